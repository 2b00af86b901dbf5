// tl.device_print: one line per element, "pid (x, y, z) idx (i, j) prefix value".
#pragma once
#include "launch.h"

extern "C" int printf(const char *, ...);

LOOM_INLINE void print_number(bool x, bool) { printf("%d\n", (int)x); }
LOOM_INLINE void print_number(i64 x, bool hex) { printf(hex ? "0x%llx\n" : "%lld\n", x); }
LOOM_INLINE void print_number(u64 x, bool hex) { printf(hex ? "0x%llx\n" : "%llu\n", x); }
LOOM_INLINE void print_number(f64 x, bool) { printf("%f\n", x); }
LOOM_INLINE void print_number(const void *x, bool) { printf("%p\n", x); }

static void print_place(const Program &p, const char *prefix, const i32 *index, int rank) {
  printf("pid (%d, %d, %d) idx (", p.id[0], p.id[1], p.id[2]);
  for (int d = 0; d < rank; ++d) printf(d ? ", %d" : "%d", index[d]);
  printf(")%s", prefix);
}

template <class T> struct widest { typedef i64 type; };
template <> struct widest<u8> { typedef u64 type; };
template <> struct widest<u16> { typedef u64 type; };
template <> struct widest<u32> { typedef u64 type; };
template <> struct widest<u64> { typedef u64 type; };
template <> struct widest<f32> { typedef f64 type; };
template <> struct widest<f64> { typedef f64 type; };
template <> struct widest<bool> { typedef bool type; };
template <class T> struct widest<T *> { typedef const void *type; };

template <class T, int RANK>
static void print_value(const Program &p, const char *prefix, const i32 (&index)[RANK], T x, bool hex) {
  print_place(p, prefix, index, RANK - 1);
  print_number((typename widest<T>::type)x, hex);
}
static void print_line(const Program &p, const char *prefix) {
  print_place(p, prefix, nullptr, 0);
  printf("\n");
}
