// The matrix units of a warp as a library of handlers.
#include "matrix.h"

GPU_LIBRARY(GPU_TABLE(gpu::MATRIX_TABLE))
