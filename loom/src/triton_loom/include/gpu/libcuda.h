// Common part of the emulated libcuda: its interface to Python, its state, and its errors.
#pragma once

#include <cuda.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>

// ---- what Python and this library tell each other; the twins are in emulator/libcuda.py ------------------------------

struct Device {
  int32_t capability;  // 90 for an sm_90; also the number of the device
  int32_t multiprocessors;
  int32_t shared_per_block;  // if a kernel opts in to more than 48 KiB
  int32_t shared_per_multiprocessor;
  int32_t threads_per_multiprocessor;
  int32_t blocks_per_multiprocessor;
  int32_t registers;  // of a block, and of a multiprocessor
  int32_t clock;      // kHz, as the two below
  int32_t memory_clock;
  int32_t memory_bits;  // the width of the bus
};

struct Parameter {
  uint32_t offset, bytes;
};

// A kernel of a module. CUfunction is a pointer to one.
struct Kernel {
  const char *name;
  const Parameter *parameters;
  uint32_t parameter_count, parameter_bytes;
  int32_t capability;        // of the target that it was compiled for,
  int32_t for_no_other;      // as sm_90a is
  int32_t threads[3];        // of a block; 0: any number
  int32_t static_shared;     // bytes
  int32_t dynamic_shared;    // the maximum that a launch may request
  int32_t registers;         // the maximum of a thread, 0 if the text does not say
  int32_t any_cluster_size;  // up to 16 blocks rather than 8
};

struct Launch {
  Kernel *kernel;
  uint32_t grid[3], block[3], cluster[3];
  uint32_t shared;                   // bytes of dynamic shared memory
  int32_t cooperative, overlapping;  // the latter: with the end of the previous launch (programmatic dependent launch)
  uint32_t parameter_bytes;
  const void *parameters;  // as in the .param space
};

// Python's functions. Each returns CUDA_SUCCESS, or an error after it has called loom_cuda_explain.
struct Host {
  CUresult (*load)(const char *text, uint64_t *module);
  CUresult (*find)(uint64_t module, const char *name, Kernel **kernel);
  CUresult (*launch)(const Launch *launch);
};

namespace {

Host host;
const Device *devices;
int device_count;
const Device *current;  // null: no GPU is being emulated

// ---- errors --------------------------------------------------------------------------------------------------------

thread_local char explanation[900];  // Triton's buffer has 1,024 bytes, with some words of its own
thread_local CUresult explained = CUDA_SUCCESS;

__attribute__((format(printf, 2, 3))) CUresult refuse(CUresult code, const char *format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(explanation, sizeof explanation, format, values);
  va_end(values);
  return explained = code;
}

const char *name_of(CUresult code) {
  switch (code) {
    case CUDA_SUCCESS: return "CUDA_SUCCESS";
    case CUDA_ERROR_INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
    case CUDA_ERROR_NO_DEVICE: return "CUDA_ERROR_NO_DEVICE";
    case CUDA_ERROR_INVALID_DEVICE: return "CUDA_ERROR_INVALID_DEVICE";
    case CUDA_ERROR_INVALID_IMAGE: return "CUDA_ERROR_INVALID_IMAGE";
    case CUDA_ERROR_NO_BINARY_FOR_GPU: return "CUDA_ERROR_NO_BINARY_FOR_GPU";
    case CUDA_ERROR_INVALID_PTX: return "CUDA_ERROR_INVALID_PTX";
    case CUDA_ERROR_NOT_FOUND: return "CUDA_ERROR_NOT_FOUND";
    case CUDA_ERROR_LAUNCH_FAILED: return "CUDA_ERROR_LAUNCH_FAILED";
    case CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE: return "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE";
    case CUDA_ERROR_NOT_SUPPORTED: return "CUDA_ERROR_NOT_SUPPORTED";
    default: return "a CUDA error that the emulated driver does not raise";
  }
}

CUresult no_device() {
  return refuse(CUDA_ERROR_NO_DEVICE, "no GPU is emulated here: call it inside of `with triton_loom.emulate(...)`");
}

#define NEEDS_A_DEVICE                \
  do {                                \
    if (!current) return no_device(); \
  } while (0)

#define RETURN_IF_REFUSED(call)              \
  do {                                       \
    const CUresult code_ = (call);           \
    if (code_ != CUDA_SUCCESS) return code_; \
  } while (0)

}  // namespace
