// What sm_90 has beside the warps, as a library of handlers: mbarriers, bulk copies of tiles, products of warp groups.
#include "bulk.h"
#include "maps.h"
#include "mbarrier.h"
#include "wgmma.h"

GPU_LIBRARY(GPU_TABLE(gpu::MBARRIER_TABLE), GPU_TABLE(gpu::MAPS_TABLE), GPU_TABLE(gpu::BULK_TABLE),
            GPU_TABLE(gpu::WGMMA_TABLE))
