// The functions of the CUDA driver API that Triton's NVIDIA driver calls, for a GPU that is emulated on host memory.
//
// Built as libcuda.so.1, it replaces NVIDIA's library: Triton's own C code packs arguments, requests shared memory, encodes
// tensor maps and launches, and all of these calls arrive here. What CUDA documents as an error is refused with CUDA's code
// for it and a sentence that says what was wrong. Modules are PTX texts: Python (emulator/libcuda.py), called through
// `Host`, reads them and runs kernels.
#include <cuda.h>
#include <stdint.h>
#include <string.h>

#include "libcuda.h"
#include "libcuda_tensor_map.h"

namespace {

// ---- devices -------------------------------------------------------------------------------------------------------

// The number of a device is its capability, so that kernels in Triton's caches, which are keyed by device, are never mixed
// up. Number 0 is the one that is being emulated.
const Device *device_of(CUdevice number) {
  if (number == 0) return current;
  for (int i = 0; i < device_count; ++i)
    if (devices[i].capability == number) return devices + i;
  return nullptr;
}

const int MOST_THREADS = 1024, OPTIONAL_ABOVE = 48 * 1024, MOST_GRID_YZ = 65535, MOST_BLOCK_Z = 64;
const int RESERVED_SHARED = 1024;  // of each block, by the system, from sm_80 on
const uint32_t MOST_GRID_X = 0x7fffffff;
const uint32_t MOST_PARAMETER_BYTES = 32764;

CUresult attribute_of(const Device &device, CUdevice_attribute attribute, int *value) {
  switch (int(attribute)) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = device.capability / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = device.capability % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = device.multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = MOST_THREADS; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = MOST_BLOCK_Z; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = MOST_GRID_X; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = MOST_GRID_YZ; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = OPTIONAL_ABOVE; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = device.shared_per_block; break;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: *value = RESERVED_SHARED; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = device.shared_per_multiprocessor; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = device.threads_per_multiprocessor; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *value = device.blocks_per_multiprocessor; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = device.registers; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = device.clock; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = device.memory_clock; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = device.memory_bits; break;
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: *value = 1; break;
    default: return refuse(CUDA_ERROR_INVALID_VALUE, "the emulated device has no attribute %d", int(attribute));
  }
  return CUDA_SUCCESS;
}

// ---- launches ------------------------------------------------------------------------------------------------------

Kernel *kernel_of(CUfunction function) { return reinterpret_cast<Kernel *>(function); }

// How many blocks a device holds at once, as far as a kernel's PTX tells: registers are not known before ptxas.
int64_t resident_blocks(const Device &device, const Kernel &kernel, int64_t threads, int64_t shared) {
  int64_t blocks = device.blocks_per_multiprocessor;
  const int64_t by_threads = device.threads_per_multiprocessor / ((threads + 31) / 32 * 32);
  const int64_t by_shared = device.shared_per_multiprocessor / (shared + kernel.static_shared + RESERVED_SHARED);
  if (by_threads < blocks) blocks = by_threads;
  if (by_shared < blocks) blocks = by_shared;
  return blocks * device.multiprocessors;
}

CUresult check_target(const Kernel &kernel) {
  const bool runs =
      kernel.for_no_other ? kernel.capability == current->capability : kernel.capability <= current->capability;
  if (runs) return CUDA_SUCCESS;
  return refuse(CUDA_ERROR_NO_BINARY_FOR_GPU, "%s was compiled for sm_%d%s, and the GPU is an sm_%d", kernel.name,
                kernel.capability, kernel.for_no_other ? "a" : "", current->capability);
}

CUresult check_shared(const Kernel &kernel, int64_t dynamic) {
  const int64_t most = current->shared_per_block - kernel.static_shared;
  if (dynamic < 0 || dynamic > most)
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  "%s asks for %lld bytes of dynamic shared memory, and an sm_%d has %lld for a block", kernel.name,
                  (long long)dynamic, current->capability, (long long)most);
  return CUDA_SUCCESS;
}

CUresult check_grid(const Kernel &kernel, const uint32_t *grid) {
  if (grid[0] && grid[1] && grid[2] && grid[0] <= MOST_GRID_X && grid[1] <= MOST_GRID_YZ && grid[2] <= MOST_GRID_YZ)
    return CUDA_SUCCESS;
  return refuse(CUDA_ERROR_INVALID_VALUE,
                "%s is launched on a grid of %u x %u x %u blocks; a grid has 1 to 2147483647 blocks along x and 1 to "
                "65535 along y and along z",
                kernel.name, grid[0], grid[1], grid[2]);
}

CUresult check_block(const Kernel &kernel, const uint32_t *block) {
  const int64_t threads = int64_t(block[0]) * block[1] * block[2];
  if (threads < 1 || threads > MOST_THREADS || block[2] > MOST_BLOCK_Z)
    return refuse(CUDA_ERROR_INVALID_VALUE, "%s is launched with blocks of %u x %u x %u threads; a block has 1 to 1024",
                  kernel.name, block[0], block[1], block[2]);
  if (kernel.threads[0])
    for (int d = 0; d < 3; ++d)
      if (block[d] != uint32_t(kernel.threads[d]))
        return refuse(CUDA_ERROR_INVALID_VALUE,
                      "%s is launched with blocks of %u x %u x %u threads, and was compiled (.reqntid) for "
                      "%d x %d x %d",
                      kernel.name, block[0], block[1], block[2], kernel.threads[0], kernel.threads[1],
                      kernel.threads[2]);
  return CUDA_SUCCESS;
}

CUresult check_cluster(const Kernel &kernel, const Launch &launch) {
  const int64_t blocks = int64_t(launch.cluster[0]) * launch.cluster[1] * launch.cluster[2];
  if (blocks == 1) return CUDA_SUCCESS;
  const int most = kernel.any_cluster_size ? 16 : 8;
  if (current->capability < 90 || blocks < 1 || blocks > most)
    return refuse(CUDA_ERROR_INVALID_VALUE, "%s is launched with clusters of %lld blocks; an sm_%d has up to %d",
                  kernel.name, (long long)blocks, current->capability, current->capability < 90 ? 1 : most);
  for (int d = 0; d < 3; ++d)
    if (launch.grid[d] % launch.cluster[d])
      return refuse(CUDA_ERROR_INVALID_VALUE,
                    "%s is launched on %u blocks along dimension %d, which clusters of %u do not divide", kernel.name,
                    launch.grid[d], d, launch.cluster[d]);
  return CUDA_SUCCESS;
}

CUresult check_cooperative(const Kernel &kernel, const Launch &launch) {
  const int64_t blocks = int64_t(launch.grid[0]) * launch.grid[1] * launch.grid[2];
  const int64_t threads = int64_t(launch.block[0]) * launch.block[1] * launch.block[2];
  const int64_t most = resident_blocks(*current, kernel, threads, launch.shared);
  if (!launch.cooperative || blocks <= most) return CUDA_SUCCESS;
  return refuse(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
                "%s is launched cooperatively on %lld blocks, and an sm_%d with %d multiprocessors holds %lld of them "
                "at once, or fewer",
                kernel.name, (long long)blocks, current->capability, current->multiprocessors, (long long)most);
}

CUresult read_attributes(const CUlaunchConfig &config, Launch *launch) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const CUlaunchAttributeValue &value = config.attrs[i].value;
    switch (int(config.attrs[i].id)) {
      case CU_LAUNCH_ATTRIBUTE_IGNORE:
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: break;  // concerns time alone
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE: launch->cooperative = value.cooperative; break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
        launch->overlapping = value.programmaticStreamSerializationAllowed;
        break;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
        launch->cluster[0] = value.clusterDim.x;
        launch->cluster[1] = value.clusterDim.y;
        launch->cluster[2] = value.clusterDim.z;
        break;
      default:
        return refuse(CUDA_ERROR_NOT_SUPPORTED, "%s is launched with attribute %d, which is not emulated",
                      launch->kernel->name, int(config.attrs[i].id));
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

// ---- for Python ----------------------------------------------------------------------------------------------------

// This name distinguishes the library from NVIDIA's. Called once, before anything else.
void loom_cuda_connect(const Host *connected, const Device *known, int count) {
  host = *connected;
  devices = known;
  device_count = count;
}

// Makes an sm_`capability` the device of all calls, and returns the previous one; 0 stands for none.
int loom_cuda_emulate(int capability) {
  const int before = current ? current->capability : 0;
  current = capability ? device_of(capability) : nullptr;
  return before;
}

// Sets the message of the error that the caller is about to return.
void loom_cuda_explain(int code, const char *text) { refuse(CUresult(code), "%s", text); }

// ---- errors and versions -------------------------------------------------------------------------------------------

CUresult cuGetErrorString(CUresult code, const char **text) {
  *text = code == explained && code != CUDA_SUCCESS ? explanation : name_of(code);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult code, const char **text) {
  *text = name_of(code);
  return CUDA_SUCCESS;
}

CUresult cuInit(unsigned) { return current ? CUDA_SUCCESS : no_device(); }

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;  // of the header, which comes with Triton
  return CUDA_SUCCESS;
}

// ---- devices and contexts ------------------------------------------------------------------------------------------

CUresult cuDeviceGetCount(int *count) {
  *count = current != nullptr;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  NEEDS_A_DEVICE;
  *device = ordinal;  // even if there is none: Triton ignores this error and checks that of the next call
  return device_of(ordinal) ? CUDA_SUCCESS : refuse(CUDA_ERROR_INVALID_DEVICE, "there is no device %d", ordinal);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice number) {
  NEEDS_A_DEVICE;
  const Device *device = device_of(number);
  if (!device) return refuse(CUDA_ERROR_INVALID_DEVICE, "there is no device %d", number);
  return attribute_of(*device, attribute, value);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice number) {
  NEEDS_A_DEVICE;
  const Device *device = device_of(number);
  if (!device) return refuse(CUDA_ERROR_INVALID_DEVICE, "there is no device %d", number);
  *context = reinterpret_cast<CUcontext>(const_cast<Device *>(device));
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = reinterpret_cast<CUcontext>(const_cast<Device *>(current));
  return current ? CUDA_SUCCESS : no_device();
}

// The block of `emulate` chooses the device; choosing the same one again is fine.
CUresult cuCtxSetCurrent(CUcontext context) {
  NEEDS_A_DEVICE;
  if (context != reinterpret_cast<CUcontext>(const_cast<Device *>(current)))
    return refuse(CUDA_ERROR_INVALID_DEVICE, "the emulated device is an sm_%d, and another one was asked for",
                  current->capability);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  NEEDS_A_DEVICE;
  *device = current->capability;
  return CUDA_SUCCESS;
}

// The only limit that Triton sets is the size of the printf buffer, which does not exist here.
CUresult cuCtxGetLimit(size_t *value, CUlimit) {
  NEEDS_A_DEVICE;
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit, size_t) {
  NEEDS_A_DEVICE;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus *status) {
  NEEDS_A_DEVICE;
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

// Every address of the process is valid on the device. Whether a kernel may touch it is checked at the access.
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  NEEDS_A_DEVICE;
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "attribute %d of a pointer is not emulated", int(attribute));
  *static_cast<CUdeviceptr *>(value) = pointer;
  return CUDA_SUCCESS;
}

// ---- modules and functions -----------------------------------------------------------------------------------------

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  NEEDS_A_DEVICE;
  if (!memcmp(image,
              "\x7f"
              "ELF",
              4) ||
      !memcmp(image, "\x50\xed\x55\xba", 4))
    return refuse(CUDA_ERROR_INVALID_IMAGE,
                  "the module is a cubin, which is machine code: the emulated GPU runs PTX. Was the kernel compiled "
                  "outside of `with triton_loom.emulate(...)`?");
  uint64_t number = 0;
  RETURN_IF_REFUSED(host.load(static_cast<const char *>(image), &number));
  *module = reinterpret_cast<CUmodule>(number);
  return CUDA_SUCCESS;
}

// A module stays loaded: Triton may launch its kernel again.
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  NEEDS_A_DEVICE;
  Kernel *kernel = nullptr;
  RETURN_IF_REFUSED(host.find(reinterpret_cast<uint64_t>(module), name, &kernel));
  *function = reinterpret_cast<CUfunction>(kernel);
  return check_target(*kernel);
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  NEEDS_A_DEVICE;
  const Kernel &kernel = *kernel_of(function);
  const int required = kernel.threads[0] * kernel.threads[1] * kernel.threads[2];
  switch (int(attribute)) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = required ? required : MOST_THREADS; break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = kernel.static_shared; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = kernel.dynamic_shared; break;
    // ptxas, which would know, has not run. A thread may use as many as the text says, else as many as a block of its
    // size leaves it.
    case CU_FUNC_ATTRIBUTE_NUM_REGS: {
      const int left = current->registers / (required ? required : MOST_THREADS) / 8 * 8;
      *value = kernel.registers ? kernel.registers : left < 255 ? left : 255;
      break;
    }
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = 0; break;  // spills, which are ptxas' as well
    case CU_FUNC_ATTRIBUTE_PTX_VERSION: *value = kernel.capability; break;
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = current->capability; break;
    default: return refuse(CUDA_ERROR_INVALID_VALUE, "an emulated function has no attribute %d", int(attribute));
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  NEEDS_A_DEVICE;
  Kernel &kernel = *kernel_of(function);
  switch (int(attribute)) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      RETURN_IF_REFUSED(check_shared(kernel, value));
      kernel.dynamic_shared = value;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: kernel.any_cluster_size = value; return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: return CUDA_SUCCESS;  // concerns time alone
    default:
      return refuse(CUDA_ERROR_INVALID_VALUE, "attribute %d of an emulated function cannot be set", int(attribute));
  }
}

CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

// ---- launches ------------------------------------------------------------------------------------------------------

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **values, void **extra) {
  NEEDS_A_DEVICE;
  Kernel &kernel = *kernel_of(function);
  Launch launch = {&kernel,
                   {config->gridDimX, config->gridDimY, config->gridDimZ},
                   {config->blockDimX, config->blockDimY, config->blockDimZ},
                   {1, 1, 1},
                   config->sharedMemBytes,
                   0,
                   0,
                   kernel.parameter_bytes,
                   nullptr};
  RETURN_IF_REFUSED(read_attributes(*config, &launch));
  RETURN_IF_REFUSED(check_target(kernel));
  RETURN_IF_REFUSED(check_grid(kernel, launch.grid));
  RETURN_IF_REFUSED(check_block(kernel, launch.block));
  RETURN_IF_REFUSED(check_shared(kernel, launch.shared));
  if (int64_t(launch.shared) > kernel.dynamic_shared)
    return refuse(CUDA_ERROR_INVALID_VALUE,
                  "%s is launched with %u bytes of dynamic shared memory and is allowed %d: more than 48 KiB have to "
                  "be asked for by cuFuncSetAttribute",
                  kernel.name, launch.shared, kernel.dynamic_shared);
  RETURN_IF_REFUSED(check_cluster(kernel, launch));
  RETURN_IF_REFUSED(check_cooperative(kernel, launch));
  if (extra || (kernel.parameter_count && !values))
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "%s is launched with its parameters in a buffer, which is not emulated",
                  kernel.name);
  if (kernel.parameter_bytes > MOST_PARAMETER_BYTES)
    return refuse(CUDA_ERROR_INVALID_VALUE, "%s has %u bytes of parameters, and a kernel has at most %u", kernel.name,
                  kernel.parameter_bytes, MOST_PARAMETER_BYTES);
  alignas(128) char packed[MOST_PARAMETER_BYTES + 1];
  memset(packed, 0, kernel.parameter_bytes);
  for (uint32_t i = 0; i < kernel.parameter_count; ++i)
    memcpy(packed + kernel.parameters[i].offset, values[i], kernel.parameters[i].bytes);
  launch.parameters = packed;
  return host.launch(&launch);
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  NEEDS_A_DEVICE;
  Kernel &kernel = *kernel_of(function);
  Launch launch = {&kernel, {}, {}, {1, 1, 1}, config->sharedMemBytes, 0, 0, 0, nullptr};
  RETURN_IF_REFUSED(read_attributes(*config, &launch));
  RETURN_IF_REFUSED(check_shared(kernel, launch.shared));
  const int64_t threads = int64_t(config->blockDimX) * config->blockDimY * config->blockDimZ;
  const int64_t blocks = int64_t(launch.cluster[0]) * launch.cluster[1] * launch.cluster[2];
  *clusters = int(resident_blocks(*current, kernel, threads, launch.shared) / blocks);
  return CUDA_SUCCESS;
}

}  // extern "C"
