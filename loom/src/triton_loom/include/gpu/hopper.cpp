// Library of handlers for sm_90's asynchronous units: mbarriers, bulk copies of tiles, products of warp groups; and for
// the arrival of sm_100's products at an mbarrier.
#include "bulk.h"
#include "maps.h"
#include "mbarrier.h"
#include "tensor_commit.h"
#include "wgmma.h"

GPU_LIBRARY(GPU_TABLE(gpu::MBARRIER_TABLE), GPU_TABLE(gpu::MAPS_TABLE), GPU_TABLE(gpu::BULK_TABLE),
            GPU_TABLE(gpu::WGMMA_TABLE), GPU_TABLE(gpu::TENSOR_COMMIT_TABLE))
