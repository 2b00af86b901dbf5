// Library of handlers for sm_100's asynchronous units: tensor memory, and the products and copies that write it.
#include "tcgen05.h"
#include "tensor_memory.h"

GPU_LIBRARY(GPU_TABLE(gpu::TENSOR_MEMORY_TABLE), GPU_TABLE(gpu::TCGEN05_TABLE))
