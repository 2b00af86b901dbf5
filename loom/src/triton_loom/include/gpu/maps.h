// Tensor maps: reading one for a copy, and making one in a kernel (tensormap.replace, field by field in shared memory, then
// a copy to global memory that bulk copies can see after a fence).
#pragma once
#include "block_units.h"

namespace gpu {

// ---- is it a map? ---------------------------------------------------------------------------------------

// Whether this map can be used for a copy of `rank` dimensions. Interleaved tiles, element strides and elements smaller than
// a byte are not emulated, and such a map counts as unusable: better a finding than wrong bytes.
static bool is_usable(const TensorMap &map, u32 rank) {
  if (!map.is_complete() || map.rank() != (int)rank || rank > 5) return false;
  if (map.interleave != Interleave::none || map.swizzle > Swizzle::bytes128) return false;
  if (map.swizzle_atom != SwizzleAtom::bytes16 || map.type > ElementType::tf32_ftz || map.address % 16) return false;
  for (u32 d = 0; d < rank; ++d) {
    if (map.box[d] == 0 || map.box[d] > 256 || map.element_stride[d] != 1 || map.dimension[d] > 1ull << 32) return false;
    if (d + 1 < rank && map.stride[d] % 16) return false;
  }
  const u32 row = map.box[0] * (u32)element_bits(map.type) / 8;
  return row % CHUNK == 0 && (map.swizzle == Swizzle::none || row <= (u32)swizzle_bytes(map.swizzle));
}

static const MadeMap *made_map(Block &b, u64 address) {
  for (const MadeMap &map : units_of(b).maps)
    if (map.address == address) return &map;
  return nullptr;
}
LOOM_INLINE bool knows(const Warp &w, u32 warp, Time time) { return warp == w.number || time <= w.clocks->known[warp]; }

// The map that a lane names for a copy of `rank` dimensions; reports and returns false if it is unusable.
static bool read_map(Warp &w, const Instruction &i, u32 lane, u64 address, u32 rank, TensorMap &to) {
  Block &b = *w.block;
  if (address % 64) return found(w, MISALIGNED, i.number, lane, address), false;
  if (!range_of(*b.worker, address, address + sizeof to)) return found(w, GLOBAL_BOUNDS, i.number, lane, address), false;
  if (const MadeMap *made = made_map(b, address)) {
    bool acquired = false;
    for (u32 warp = 0; warp < b.warp_count; ++warp)
      acquired |= made->acquired[warp] && knows(w, warp, made->acquired[warp]);
    if (!acquired) found(w, TENSOR_MAP_NOT_ACQUIRED, i.number, lane, address, made->instruction, made->warp * LANES);
  }
  __builtin_memcpy(&to, (const void *)address, sizeof to);
  if (!is_usable(to, rank)) return found(w, TENSOR_MAP, i.number, lane, address), false;
  return true;
}

// ---- making one -----------------------------------------------------------------------------------------

enum Field : u32 {  // in the order of MAP_FIELDS in ptx/asynchronous.py
  FIELD_ADDRESS, FIELD_RANK, FIELD_BOX, FIELD_DIMENSION, FIELD_STRIDE, FIELD_ELEMENT_STRIDE, FIELD_TYPE, FIELD_INTERLEAVE,
  FIELD_SWIZZLE, FIELD_SWIZZLE_ATOM, FIELD_FILL,
};
struct Place {
  u32 offset, bytes, given;
};
LOOM_INLINE Place place_of(Field field, u32 which) {
#define GPU_FIELD(NAME, GIVEN) {(u32)__builtin_offsetof(TensorMap, NAME), sizeof(TensorMap::NAME), TensorMap::GIVEN}
#define GPU_FIELDS(NAME, GIVEN)                                                                     \
  {(u32)(__builtin_offsetof(TensorMap, NAME) + which * sizeof(TensorMap{}.NAME[0])), sizeof(TensorMap{}.NAME[0]), \
   (u32)TensorMap::GIVEN << which}
  switch (field) {
    case FIELD_ADDRESS: return GPU_FIELD(address, ADDRESS);
    case FIELD_RANK: return GPU_FIELD(last_dimension, RANK);
    case FIELD_BOX: return GPU_FIELDS(box, BOX);
    case FIELD_DIMENSION: return GPU_FIELDS(dimension, DIMENSION);
    case FIELD_STRIDE: return GPU_FIELDS(stride, STRIDE);
    case FIELD_ELEMENT_STRIDE: return GPU_FIELDS(element_stride, ELEMENT_STRIDE);
    case FIELD_TYPE: return GPU_FIELD(type, ELEMENT_TYPE);
    case FIELD_INTERLEAVE: return GPU_FIELD(interleave, INTERLEAVE);
    case FIELD_SWIZZLE: return GPU_FIELD(swizzle, SWIZZLE);
    case FIELD_SWIZZLE_ATOM: return GPU_FIELD(swizzle_atom, SWIZZLE_ATOM);
    case FIELD_FILL: return GPU_FIELD(fill, FILL);
  }
#undef GPU_FIELD
#undef GPU_FIELDS
  return {};
}

// Operands: address (64 bits, in shared memory), value. The immediate has the address' offset, the field from bit 32, and
// the dimension from bit 40.
template <class Value> static void replace_field(Warp &w, const Instruction &i) {
  Block &b = *w.block;
  const Field field = (Field)(i.immediate >> 32 & 255);
  const Place place = place_of(field, (u32)(i.immediate >> 40));
  GPU_EACH_LANE(w.mask, lane) {
    u64 addresses[LANES];
    const u64 map = addresses[lane] = w.longs(i, 0)[lane] + (u64)(i64)(i32)i.immediate;
    if (!reachable_shared(w, i, addresses, sizeof(TensorMap), 1u << lane)) continue;
    const u64 value = ((const Value *)(w.registers + i.operands[1]))[lane];
    // A dimension of 2^32 elements is given as 0.
    const u64 data = field == FIELD_DIMENSION && !value ? 1ull << 32 : value;
    if (place.bytes < sizeof data && data >> 8 * place.bytes) found(w, TENSOR_MAP, i.number, lane, map);
    write_one(w, i, lane, map + place.offset, &data, place.bytes);
    // A bit set of the given fields is stored with them, so the bytes must have been cleared before.
    u32 given;
    addresses[lane] = map + __builtin_offsetof(TensorMap, given);
    if (b.checks) read_shared(w, i, addresses, sizeof given, 1u << lane);
    __builtin_memcpy(&given, b.shared + (addresses[lane] - SHARED_BASE), sizeof given);
    given |= place.given;
    write_one(w, i, lane, addresses[lane], &given, sizeof given);
  }
}

// The warp copies a map to global memory. Operands: destination, source. The immediate has two 32-bit offsets.
static void publish_map(Warp &w, const Instruction &i) {
  Block &b = *w.block;
  expect_whole(w, i);
  sync_lanes(w);
  const u32 first = first_lane(w.mask);
  const u64 to = w.longs(i, 0)[first] + (u64)(i64)(i32)i.immediate, from = w.longs(i, 1)[first] + (u64)(i.immediate >> 32);
  if ((to | from) % sizeof(TensorMap))
    found(w, MISALIGNED, i.number, first, to % sizeof(TensorMap) ? to : from);
  u64 source[LANES], target[LANES];
  for (u32 lane = 0; lane < LANES; ++lane) source[lane] = from + 4 * lane, target[lane] = to + 4 * lane;
  const u32 lanes = reachable_shared(w, i, source, 4, FULL) & reachable_global<true>(w, i, target, 4, FULL);
  if (lanes != FULL) return;
  u8 data[sizeof(TensorMap)];
  __builtin_memcpy(data, b.shared + (from - SHARED_BASE), sizeof data);
  if (b.checks) {
    read_shared(w, i, source, 4, lanes);
    write_global(w, i, target, data, 4, 4, lanes);
  } else __builtin_memcpy((void *)to, data, sizeof data);
  MadeMap *map = (MadeMap *)made_map(b, to);
  if (!map) {
    units_of(b).maps.push({});
    map = units_of(b).maps.end() - 1;
  }
  *map = {to, w.number, i.number, w.clocks->own};
  sync_lanes(w);
}

// Operand: the map's address. From here on, bulk copies see what the warp knows of it.
static void acquire_map(Warp &w, const Instruction &i) {
  const u64 address = w.longs(i, 0)[first_lane(w.mask)] + (u64)i.immediate;
  if (MadeMap *map = (MadeMap *)made_map(*w.block, address))
    if (knows(w, map->warp, map->made)) map->acquired[w.number] = w.clocks->own++;
}

static const Named MAPS_TABLE[] = {
  GPU_HANDLER("tensormap.replace.b32", replace_field<u32>)
  GPU_HANDLER("tensormap.replace.b64", replace_field<u64>)
  GPU_HANDLER("tensormap.cp_fenceproxy", publish_map)
  GPU_HANDLER("fence.proxy.tensormap", acquire_map)
  GPU_HANDLER("fence.proxy.async", fence_proxies)
};

}  // namespace gpu
