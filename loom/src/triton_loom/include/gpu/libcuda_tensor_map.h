// Tensor maps of the emulated libcuda: CUDA's checks, and the encoding of tensor_map.h.
#pragma once

#include <string.h>

#include "libcuda.h"
#include "tensor_map.h"

extern "C" {

// CUDA's documentation of this function in cuda.h is the list of what is checked, in its order.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dimensions, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  using gpu::ElementType;
  NEEDS_A_DEVICE;
  const CUresult wrong = CUDA_ERROR_INVALID_VALUE;
  if (current->capability < 90)
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "tensor maps are for sm_90 and later, and the GPU is an sm_%d",
                  current->capability);
  if (uint64_t(map) % 64) return refuse(wrong, "a tensor map must lie at a multiple of 64 bytes");
  static const ElementType types[] = {
      ElementType::u8,       ElementType::u16,  ElementType::u32,      ElementType::s32,   ElementType::u64,
      ElementType::s64,      ElementType::f16,  ElementType::f32,      ElementType::f64,   ElementType::bf16,
      ElementType::f32_ftz,  ElementType::tf32, ElementType::tf32_ftz, ElementType::b4x16, ElementType::b4x16_p64,
      ElementType::b6x16_p32};  // in the order of CUtensorMapDataType
  if (uint32_t(type) >= sizeof types / sizeof *types)
    return refuse(wrong, "there is no type of elements with the number %d", int(type));
  const ElementType element = types[type];
  const int bits = gpu::element_bits(element);
  const bool padded = element == ElementType::b4x16_p64 || element == ElementType::b6x16_p32;
  if (bits < 8 && current->capability < 100)
    return refuse(wrong, "elements of %d bits are for sm_100 and later, and the GPU is an sm_%d", bits,
                  current->capability);

  if (rank < 1 || rank > 5) return refuse(wrong, "a tensor map has 1 to 5 dimensions, not %u", rank);
  if (uint32_t(interleave) > CU_TENSOR_MAP_INTERLEAVE_32B)
    return refuse(wrong, "there is no interleaving with the number %d", int(interleave));
  const bool plain = interleave == CU_TENSOR_MAP_INTERLEAVE_NONE;
  const bool wide = interleave == CU_TENSOR_MAP_INTERLEAVE_32B;
  if (!plain && rank < 3) return refuse(wrong, "an interleaved tensor has 3 dimensions or more, not %u", rank);
  if (element == ElementType::b6x16_p32 && !plain) return refuse(wrong, "elements of 6 bits are not interleaved");

  const uint64_t alignment = wide || padded ? 32 : 16;
  if (uint64_t(address) % alignment)
    return refuse(wrong, "the tensor lies at %p, which is no multiple of %llu bytes", address,
                  (unsigned long long)alignment);
  for (uint32_t d = 0; d < rank; ++d)
    if (dimensions[d] < 1 || dimensions[d] > 1ull << 32)
      return refuse(wrong, "dimension %u, the innermost being 0, has %llu elements and not 1 to 2^32", d,
                    (unsigned long long)dimensions[d]);
  if (padded && dimensions[0] % 128)
    return refuse(wrong, "the innermost dimension has %llu elements of %d bits with padding, no multiple of 128",
                  (unsigned long long)dimensions[0], bits);
  if (element == ElementType::b4x16 && dimensions[0] % 2)
    return refuse(wrong, "the innermost dimension has %llu elements of 4 bits, no multiple of 2",
                  (unsigned long long)dimensions[0]);
  for (uint32_t d = 1; d < rank; ++d)
    if (strides[d - 1] % alignment || strides[d - 1] >= 1ull << 40)
      return refuse(wrong,
                    "the stride of dimension %u, the innermost being 0, is %llu bytes: no multiple of %llu below "
                    "2^40",
                    d, (unsigned long long)strides[d - 1], (unsigned long long)alignment);

  for (uint32_t d = 0; d < rank; ++d)
    if (box[d] < 1 || box[d] > 256)
      return refuse(wrong, "the box has %u elements along dimension %u, the innermost being 0, and not 1 to 256",
                    box[d], d);
  const uint32_t row_bits = box[0] * bits;
  if (plain && row_bits % 128)
    return refuse(wrong, "a row of the box has %u elements of %d bits, no multiple of 16 bytes", box[0], bits);
  if (padded && box[0] != 128)
    return refuse(wrong, "a row of the box has %u elements of %d bits with padding, and not 128", box[0], bits);
  for (uint32_t d = 0; d < rank; ++d)
    if (!(plain && d == 0) && (element_strides[d] < 1 || element_strides[d] > 8))
      return refuse(wrong, "the element stride of dimension %u is %u and not 1 to 8", d, element_strides[d]);

  if (uint32_t(swizzle) > CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B)
    return refuse(wrong, "there is no swizzle with the number %d", int(swizzle));
  const bool atoms = swizzle > CU_TENSOR_MAP_SWIZZLE_128B;
  if (atoms && current->capability < 100)
    return refuse(wrong, "swizzles of more than 16 bytes at a time are for sm_100 and later, and the GPU is an sm_%d",
                  current->capability);
  const gpu::Swizzle mode = atoms ? gpu::Swizzle::bytes128 : gpu::Swizzle(swizzle);
  if (plain && mode != gpu::Swizzle::none && row_bits > 8u * gpu::swizzle_bytes(mode))
    return refuse(wrong, "a row of the box has %u bytes, more than the %d of the swizzle", row_bits / 8,
                  gpu::swizzle_bytes(mode));
  if (wide && swizzle != CU_TENSOR_MAP_SWIZZLE_32B)
    return refuse(wrong, "an interleaving of 32 bytes needs a swizzle of 32 bytes");
  if (padded && (mode == gpu::Swizzle::bytes32 || mode == gpu::Swizzle::bytes64 ||
                 swizzle == CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B_FLIP_8B ||
                 (swizzle == CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B && element == ElementType::b4x16_p64)))
    return refuse(wrong, "elements of %d bits with padding do not go with swizzle %d", bits, int(swizzle));
  if (uint32_t(promotion) > CU_TENSOR_MAP_L2_PROMOTION_L2_256B)
    return refuse(wrong, "there is no L2 promotion with the number %d", int(promotion));
  if (uint32_t(fill) > CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA)
    return refuse(wrong, "there is no filling with the number %d", int(fill));
  if (fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && !gpu::is_float(element))
    return refuse(wrong, "elements outside of a tensor can be NaN only if they are floating-point numbers");

  gpu::TensorMap made = {};
  made.address = uint64_t(address);
  made.last_dimension = uint8_t(rank - 1);
  made.type = element;
  made.swizzle = mode;
  if (atoms) made.swizzle_atom = gpu::SwizzleAtom(swizzle - CU_TENSOR_MAP_SWIZZLE_128B);
  made.interleave = gpu::Interleave(interleave);
  made.fill = gpu::Fill(fill);
  for (uint32_t d = 0; d < rank; ++d) {
    made.dimension[d] = dimensions[d];
    made.box[d] = uint16_t(box[d]);
    made.element_stride[d] = plain && d == 0 ? 1 : uint8_t(element_strides[d]);
    if (d > 0) made.stride[d - 1] = strides[d - 1];
  }
  made.given = ~0u;
  memcpy(map, &made, sizeof made);
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeIm2col(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                 const cuuint64_t *, const int *, const int *, cuuint32_t, cuuint32_t,
                                 const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill) {
  return refuse(CUDA_ERROR_NOT_SUPPORTED, "tensor maps that gather the columns of an image (im2col) are not emulated");
}

}  // extern "C"
