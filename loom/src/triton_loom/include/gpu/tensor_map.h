// The 128 bytes of a tensor map, which describes a bulk copy. NVIDIA's encoding is not public; only the machine reads the
// bytes, so this encoding is our own. Maps are made on the host by cuTensorMapEncodeTiled (libcuda.cpp) or in a kernel by
// tensormap.replace, field by field, in memory that the kernel has filled with zeros.
//
// Numbers of types and modes are those of tensormap.replace in the PTX manual.
#pragma once

#include <stdint.h>

namespace gpu {

enum class ElementType : uint8_t {
  u8,
  u16,
  u32,
  s32,
  u64,
  s64,
  f16,
  f32,
  f32_ftz,
  f64,
  bf16,
  tf32,
  tf32_ftz,
  b4x16,      // 16 numbers of 4 bits in 8 bytes
  b4x16_p64,  // the same in global memory; 8 bytes of padding follow in shared memory
  b6x16_p32,  // 16 numbers of 6 bits in 12 bytes; 4 bytes of padding follow in shared memory
};

enum class Interleave : uint8_t { none, bytes16, bytes32 };
enum class Swizzle : uint8_t { none, bytes32, bytes64, bytes128, bytes96 };
enum class SwizzleAtom : uint8_t { bytes16, bytes32, bytes32_flip8, bytes64 };  // what a swizzle moves as a whole
enum class Fill : uint8_t { zeros, nan };                                       // of elements outside of the tensor

struct alignas(64) TensorMap {
  // The fields that have been given a value: a map with a missing field is invalid.
  enum Given : uint32_t {
    ADDRESS = 1u << 0,
    RANK = 1u << 1,
    ELEMENT_TYPE = 1u << 2,
    INTERLEAVE = 1u << 3,
    SWIZZLE = 1u << 4,
    FILL = 1u << 5,
    SWIZZLE_ATOM = 1u << 6,  // zero is right where it is not given
    BOX = 1u << 8,           // and one bit for each further dimension, here and below
    DIMENSION = 1u << 13,
    ELEMENT_STRIDE = 1u << 18,
    STRIDE = 1u << 23,
  };

  uint64_t address;
  // Triton clears bit 21 of the second word of a map, to work around a bug of some CUDA drivers. It is bit 5 of `swizzle`,
  // which is never set.
  uint8_t last_dimension;  // the rank less one
  ElementType type;
  Swizzle swizzle;
  SwizzleAtom swizzle_atom;
  Interleave interleave;
  Fill fill;
  uint8_t unused[2];
  uint64_t dimension[5];  // elements; the innermost dimension first
  uint64_t stride[4];     // bytes from one element to the next along dimensions 1, 2, ...
  uint16_t box[5];        // elements of a copy
  uint8_t element_stride[5];
  uint8_t unused_between;
  uint32_t given;  // bits of Given
  uint8_t unused_at_the_end[20];

  int rank() const { return last_dimension + 1; }

  // All fields that a map of its rank needs.
  bool is_complete() const {
    uint32_t needed = ADDRESS | RANK | ELEMENT_TYPE | INTERLEAVE | SWIZZLE | FILL;
    for (int d = 0; d < rank(); ++d) {
      needed |= (BOX << d) | (DIMENSION << d) | (ELEMENT_STRIDE << d);
      if (d > 0) needed |= STRIDE << (d - 1);
    }
    return (given & needed) == needed;
  }
};
static_assert(sizeof(TensorMap) == 128, "a tensor map has 128 bytes");

constexpr int ELEMENT_BITS[] = {8, 16, 32, 32, 64, 64, 16, 32, 32, 64, 16, 32, 32, 4, 4, 6};
constexpr int SWIZZLE_BYTES[] = {0, 32, 64, 128, 96};

// Bits of an element in global memory; 0 for an invalid type.
inline int element_bits(ElementType type) { return uint8_t(type) < 16 ? ELEMENT_BITS[uint8_t(type)] : 0; }

inline bool is_float(ElementType type) { return type >= ElementType::f16 && type <= ElementType::tf32_ftz; }

// The bytes of shared memory that a swizzle permutes: a row of the box is at most as long.
inline int swizzle_bytes(Swizzle swizzle) { return uint8_t(swizzle) < 5 ? SWIZZLE_BYTES[uint8_t(swizzle)] : 0; }

}  // namespace gpu
