// tl.device_print: one line per element, "pid (x, y, z) idx (i, j) prefix value".
#pragma once
#include "launch.h"

extern "C" int printf(const char *, ...);
extern "C" int snprintf(char *, unsigned long, const char *, ...);

// A line is assembled here and printed in one call, so that lines of several threads don't mix.
struct Line {
  char text[512];
  int length = 0;

  template <class... T> void add(const char *format, T... values) {
    const int left = (int)sizeof text - length;
    const int wanted = snprintf(text + length, left, format, values...);
    length += wanted < left ? wanted : left - 1;
  }
  void add_number(bool x, bool) { add("%d", (int)x); }
  void add_number(i64 x, bool hex) { add(hex ? "0x%llx" : "%lld", x); }
  void add_number(u64 x, bool hex) { add(hex ? "0x%llx" : "%llu", x); }
  void add_number(f64 x, bool) { add("%f", x); }
  void add_number(const void *x, bool) { add("%p", x); }

  Line(const Program &p, const char *prefix, const i32 *index, int rank) {
    add("pid (%d, %d, %d) idx (", p.id[0], p.id[1], p.id[2]);
    for (int d = 0; d < rank; ++d) add(d ? ", %d" : "%d", index[d]);
    add(")%s", prefix);
  }
  void print() { printf("%s\n", text); }
};

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
  Line line(p, prefix, index, RANK - 1);
  line.add_number((typename widest<T>::type)x, hex);
  line.print();
}
static void print_line(const Program &p, const char *prefix) { Line(p, prefix, nullptr, 0).print(); }
