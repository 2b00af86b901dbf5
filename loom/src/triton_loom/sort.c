#include "simd.h"
#include "tile.h"
#include "math.h"
#include "launch.h"

template <int W> struct combine_1 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_1 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_1<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_1<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_2 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_2 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_2<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_2<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_3 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_3 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_3<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_3<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_4 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_4 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_4<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_4<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_5 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_5 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_5<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_5<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_6 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_6 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_6<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_6<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_7 {
  vec<f32, W> a0;
  LOOM_ALWAYS void take(const combine_7 &b) {
    const vec<f32, W> v2 = loom_math::maxnum(a0, b.a0);
    a0 = v2;
  }
  LOOM_ALWAYS combine_7<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_7<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_8 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_8 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_8<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_8<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_9 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_9 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_9<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_9<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_10 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_10 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_10<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_10<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_11 {
  vec<f32, W> a0;
  LOOM_ALWAYS void take(const combine_11 &b) {
    const vec<f32, W> v2 = loom_math::maxnum(a0, b.a0);
    a0 = v2;
  }
  LOOM_ALWAYS combine_11<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_11<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_12 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_12 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_12<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_12<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_13 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_13 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_13<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_13<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_14 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_14 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_14<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_14<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_15 {
  vec<f32, W> a0;
  LOOM_ALWAYS void take(const combine_15 &b) {
    const vec<f32, W> v2 = loom_math::maxnum(a0, b.a0);
    a0 = v2;
  }
  LOOM_ALWAYS combine_15<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_15<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_16 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_16 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_16<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_16<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_17 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_17 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_17<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_17<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_18 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_18 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_18<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_18<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_19 {
  vec<f32, W> a0;
  LOOM_ALWAYS void take(const combine_19 &b) {
    const vec<f32, W> v2 = loom_math::maxnum(a0, b.a0);
    a0 = v2;
  }
  LOOM_ALWAYS combine_19<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_19<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_20 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_20 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_20<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_20<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_21 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_21 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_21<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_21<W / 2> upper() const { return {high_half(a0)}; }
};

template <int W> struct combine_22 {
  vec<i32, W> a0;
  LOOM_ALWAYS void take(const combine_22 &b) {
    const vec<i32, W> v2 = a0 ^ b.a0;
    a0 = v2;
  }
  LOOM_ALWAYS combine_22<W / 2> lower() const { return {low_half(a0)}; }
  LOOM_ALWAYS combine_22<W / 2> upper() const { return {high_half(a0)}; }
};

struct Args {
  f32 *x_ptr;
  f32 *o_ptr;
};

static void program(const Args &args, const Program &p) {  // /tmp/w/t4.py:7
  f32 *const x_ptr = args.x_ptr;
  f32 *const o_ptr = args.o_ptr;
  f32 *const kept1_v14 = (f32 *)(p.scratch + 0);  // 4x128 f32
  i32 *const kept2_iy = (i32 *)(p.scratch + 2048);  // 2x2x2x2x2x2x2x2 i32
  f32 *const kept3_ret_17 = (f32 *)(p.scratch + 3072);  // 2x2x2x2x2x2x2x2x2 f32
  i32 *const kept4_ix_19 = (i32 *)(p.scratch + 5120);  // 2x2x2x2x2x2x2x2x2 i32
  i32 *const kept5_iy_20 = (i32 *)(p.scratch + 7168);  // 2x2x2x2x2x2x2x2 i32
  f32 *const kept6_ret_32 = (f32 *)(p.scratch + 8192);  // 2x2x2x2x2x2x2x2x2 f32
  i32 *const kept7_ix_33 = (i32 *)(p.scratch + 10240);  // 2x2x2x2x2x2x2x2x2 i32
  i32 *const kept8_iy_34 = (i32 *)(p.scratch + 12288);  // 2x2x2x2x2x2x2x2 i32
  f32 *const kept9_ret_46 = (f32 *)(p.scratch + 13312);  // 2x2x2x2x2x2x2x2x2 f32
  i32 *const kept10_ix_48 = (i32 *)(p.scratch + 15360);  // 2x2x2x2x2x2x2x2x2 i32
  i32 *const kept11_iy_49 = (i32 *)(p.scratch + 17408);  // 2x2x2x2x2x2x2x2 i32
  f32 *const kept12_ret_61 = (f32 *)(p.scratch + 18432);  // 2x2x2x2x2x2x2x2x2 f32
  i32 *const kept13_ix_62 = (i32 *)(p.scratch + 20480);  // 2x2x2x2x2x2x2x2x2 i32
  i32 *const kept14_iy_63 = (i32 *)(p.scratch + 22528);  // 2x2x2x2x2x2x2x2 i32
  f32 *const kept15_ret_75 = (f32 *)(p.scratch + 23552);  // 2x2x2x2x2x2x2x2x2 f32
  i32 *const kept16_ix_76 = (i32 *)(p.scratch + 25600);  // 2x2x2x2x2x2x2x2x2 i32
  i32 *const kept17_iy_77 = (i32 *)(p.scratch + 27648);  // 2x2x2x2x2x2x2x2 i32
  f32 *const kept18_h_90 = (f32 *)(p.scratch + 28672);  // 2x2x2x2x2x2x2x2 f32
  i32 *const kept19_iy_93 = (i32 *)(p.scratch + 29696);  // 2x2x2x2x2x2x2 i32
  f32 *const kept20_ret_106 = (f32 *)(p.scratch + 30208);  // 2x2x2x2x2x2x2x2 f32
  i32 *const kept21_ix_107 = (i32 *)(p.scratch + 31232);  // 2x2x2x2x2x2x2x2 i32
  i32 *const kept22_iy_108 = (i32 *)(p.scratch + 32256);  // 2x2x2x2x2x2x2 i32
  f32 *const kept23_ret_121 = (f32 *)(p.scratch + 32768);  // 2x2x2x2x2x2x2x2 f32
  i32 *const kept24_ix_122 = (i32 *)(p.scratch + 33792);  // 2x2x2x2x2x2x2x2 i32
  i32 *const kept25_iy_123 = (i32 *)(p.scratch + 34816);  // 2x2x2x2x2x2x2 i32
  f32 *const kept26_h_137 = (f32 *)(p.scratch + 35328);  // 2x2x2x2x2x2x2 f32
  i32 *const kept27_iy_140 = (i32 *)(p.scratch + 35840);  // 2x2x2x2x2x2 i32
  f32 *const kept28_ret_153 = (f32 *)(p.scratch + 36096);  // 2x2x2x2x2x2x2 f32
  i32 *const kept29_ix_154 = (i32 *)(p.scratch + 36608);  // 2x2x2x2x2x2x2 i32
  i32 *const kept30_iy_155 = (i32 *)(p.scratch + 37120);  // 2x2x2x2x2x2 i32
  f32 *const kept31_ret_168 = (f32 *)(p.scratch + 37376);  // 2x2x2x2x2x2x2 f32
  i32 *const kept32_ix_169 = (i32 *)(p.scratch + 37888);  // 2x2x2x2x2x2x2 i32
  i32 *const kept33_iy_170 = (i32 *)(p.scratch + 38400);  // 2x2x2x2x2x2 i32
  f32 *const kept34_h_184 = (f32 *)(p.scratch + 38656);  // 2x2x2x2x2x2 f32
  i32 *const kept35_iy_187 = (i32 *)(p.scratch + 38912);  // 2x2x2x2x2 i32
  f32 *const kept36_ret_200 = (f32 *)(p.scratch + 39040);  // 2x2x2x2x2x2 f32
  i32 *const kept37_ix_201 = (i32 *)(p.scratch + 39296);  // 2x2x2x2x2x2 i32
  i32 *const kept38_iy_202 = (i32 *)(p.scratch + 39552);  // 2x2x2x2x2 i32
  f32 *const kept39_ret_215 = (f32 *)(p.scratch + 39680);  // 2x2x2x2x2x2 f32
  i32 *const kept40_ix_216 = (i32 *)(p.scratch + 39936);  // 2x2x2x2x2x2 i32
  i32 *const kept41_iy_217 = (i32 *)(p.scratch + 40192);  // 2x2x2x2x2 i32
  f32 *const kept42_h_231 = (f32 *)(p.scratch + 40320);  // 2x2x2x2x2 f32
  i32 *const kept43_iy_233 = (i32 *)(p.scratch + 40448);  // 2x2x2x2 i32
  f32 *const kept44_ret_244 = (f32 *)(p.scratch + 40512);  // 2x2x2x2x2 f32
  i32 *const kept45_ix_245 = (i32 *)(p.scratch + 40640);  // 2x2x2x2x2 i32
  i32 *const kept46_iy_246 = (i32 *)(p.scratch + 40768);  // 2x2x2x2 i32
  f32 *const kept47_ret_257 = (f32 *)(p.scratch + 40832);  // 2x2x2x2x2 f32
  i32 *const kept48_ix_258 = (i32 *)(p.scratch + 40960);  // 2x2x2x2x2 i32
  i32 *const kept49_iy_259 = (i32 *)(p.scratch + 41088);  // 2x2x2x2 i32
  f32 *const kept50_ret_270 = (f32 *)(p.scratch + 41152);  // 2x2x2x2x2 f32
  // t4.py:9
  {
    for (i32 i7 = 0; i7 < 256; ++i7) {
      auto chunk = [&](i32 i8) LOOM_ALWAYS -> combine_1<2> {
        const i32 v8 = ((i7 * 2 + i8) >> 7) * 128;
        f32 *const v10 = x_ptr + v8;
        f32 *const v13 = v10 + ((i7 * 2 + i8) & 127);
        const f32x2 v14 = load<f32x2>((const f32 *)v13);
        store<f32x2>(kept1_v14 + (i7 * 2 + i8), v14);
        const i32x2 ix = bits<i32x2>(v14);
        return {ix};
      };
      const auto total = across_lanes(reduce<2, 2>(chunk));
      kept2_iy[i7] = total.a0;
    }
  }
  // t4.py:9
  {
    for (i32 i6 = 0; i6 < 128; ++i6) {
      for (i32 i8 = 0; i8 < 2; i8 += 2) {
        auto chunk = [&](i32 i7) LOOM_ALWAYS -> combine_2<2> {
          const f32x2 h = load<f32x2>(kept1_v14 + (i6 * 4 + (i7 * 2 + i8)));
          const i32x2 ix = bits<i32x2>(h);
          const i32 iy = kept2_iy[(i6 * 2 + i7)];
          const i32x2 iy_8 = ix ^ splat<i32x2>(iy);
          const f32x2 y = bits<f32x2>(iy_8);
          const i32x2 ret_10 = mask(h > y);
          const i32x2 ret_14 = convert<i32x2>(ret_10 & 1);
          const i32x2 ret_13 = splat<i32x2>(i7) ^ ramp<i32x2>(i8, 1);
          const i32x2 ret_16 = mask(ret_14 != ret_13);
          const f32x2 ret_17 = select(ret_16, y, h);
          store<f32x2>(kept3_ret_17 + (i6 * 4 + (i7 * 2 + i8)), ret_17);
          const i32x2 ix_19 = bits<i32x2>(ret_17);
          store<i32x2>(kept4_ix_19 + (i6 * 4 + (i7 * 2 + i8)), ix_19);
          return {ix_19};
        };
        const auto total = reduce<1, 2>(chunk);
        store<i32x2>(kept5_iy_20 + (i6 * 2 + i8), total.a0);
      }
    }
  }
  // t4.py:9
  {
    for (i32 i5 = 0; i5 < 64; ++i5) {
      for (i32 i6 = 0; i6 < 2; ++i6) {
        for (i32 i7 = 0; i7 < 2; ++i7) {
          const i32 ret_28 = i6 ^ i7;
          auto chunk = [&](i32 i8) LOOM_ALWAYS -> combine_3<2> {
            const f32x2 ret_17 = load<f32x2>(kept3_ret_17 + (i5 * 8 + (i6 * 4 + (i7 * 2 + i8))));
            const i32x2 ix_19 = load<i32x2>(kept4_ix_19 + (i5 * 8 + (i6 * 4 + (i7 * 2 + i8))));
            const i32x2 iy_20 = load<i32x2>(kept5_iy_20 + (i5 * 4 + (i6 * 2 + i8)));
            const i32x2 iy_23 = ix_19 ^ iy_20;
            const f32x2 y_24 = bits<f32x2>(iy_23);
            const i32x2 ret_25 = mask(ret_17 > y_24);
            const i32x2 ret_29 = convert<i32x2>(ret_25 & 1);
            const i32x2 ret_31 = mask(ret_29 != splat<i32x2>(ret_28));
            const f32x2 ret_32 = select(ret_31, y_24, ret_17);
            store<f32x2>(kept6_ret_32 + (i5 * 8 + (i6 * 4 + (i7 * 2 + i8))), ret_32);
            const i32x2 ix_33 = bits<i32x2>(ret_32);
            store<i32x2>(kept7_ix_33 + (i5 * 8 + (i6 * 4 + (i7 * 2 + i8))), ix_33);
            return {ix_33};
          };
          const auto total = across_lanes(reduce<2, 2>(chunk));
          kept8_iy_34[(i5 * 4 + (i6 * 2 + i7))] = total.a0;
        }
      }
    }
  }
  // t4.py:9
  {
    for (i32 i5 = 0; i5 < 64; ++i5) {
      for (i32 i7 = 0; i7 < 2; ++i7) {
        for (i32 i8 = 0; i8 < 2; i8 += 2) {
          auto chunk = [&](i32 i6) LOOM_ALWAYS -> combine_4<2> {
            const f32x2 ret_32 = load<f32x2>(kept6_ret_32 + (i5 * 8 + (i6 * 4 + (i7 * 2 + i8))));
            const i32x2 ix_33 = load<i32x2>(kept7_ix_33 + (i5 * 8 + (i6 * 4 + (i7 * 2 + i8))));
            const i32 iy_34 = kept8_iy_34[(i5 * 4 + (i6 * 2 + i7))];
            const i32x2 iy_37 = ix_33 ^ splat<i32x2>(iy_34);
            const f32x2 y_38 = bits<f32x2>(iy_37);
            const i32x2 ret_39 = mask(ret_32 > y_38);
            const i32x2 ret_43 = convert<i32x2>(ret_39 & 1);
            const i32x2 ret_42 = splat<i32x2>(i6) ^ ramp<i32x2>(i8, 1);
            const i32x2 ret_45 = mask(ret_43 != ret_42);
            const f32x2 ret_46 = select(ret_45, y_38, ret_32);
            store<f32x2>(kept9_ret_46 + (i5 * 8 + (i6 * 4 + (i7 * 2 + i8))), ret_46);
            const i32x2 ix_48 = bits<i32x2>(ret_46);
            store<i32x2>(kept10_ix_48 + (i5 * 8 + (i6 * 4 + (i7 * 2 + i8))), ix_48);
            return {ix_48};
          };
          const auto total = reduce<1, 2>(chunk);
          store<i32x2>(kept11_iy_49 + (i5 * 4 + (i7 * 2 + i8)), total.a0);
        }
      }
    }
  }
  // t4.py:9
  {
    for (i32 i4 = 0; i4 < 32; ++i4) {
      for (i32 i5 = 0; i5 < 2; ++i5) {
        for (i32 i6 = 0; i6 < 2; ++i6) {
          const i32 ret_57 = i5 ^ i6;
          for (i32 i8 = 0; i8 < 2; i8 += 2) {
            auto chunk = [&](i32 i7) LOOM_ALWAYS -> combine_5<2> {
              const f32x2 ret_46 = load<f32x2>(kept9_ret_46 + (i4 * 16 + (i5 * 8 + (i6 * 4 + (i7 * 2 + i8)))));
              const i32x2 ix_48 = load<i32x2>(kept10_ix_48 + (i4 * 16 + (i5 * 8 + (i6 * 4 + (i7 * 2 + i8)))));
              const i32x2 iy_49 = load<i32x2>(kept11_iy_49 + (i4 * 8 + (i5 * 4 + (i7 * 2 + i8))));
              const i32x2 iy_52 = ix_48 ^ iy_49;
              const f32x2 y_53 = bits<f32x2>(iy_52);
              const i32x2 ret_54 = mask(ret_46 > y_53);
              const i32x2 ret_58 = convert<i32x2>(ret_54 & 1);
              const i32x2 ret_60 = mask(ret_58 != splat<i32x2>(ret_57));
              const f32x2 ret_61 = select(ret_60, y_53, ret_46);
              store<f32x2>(kept12_ret_61 + (i4 * 16 + (i5 * 8 + (i6 * 4 + (i7 * 2 + i8)))), ret_61);
              const i32x2 ix_62 = bits<i32x2>(ret_61);
              store<i32x2>(kept13_ix_62 + (i4 * 16 + (i5 * 8 + (i6 * 4 + (i7 * 2 + i8)))), ix_62);
              return {ix_62};
            };
            const auto total = reduce<1, 2>(chunk);
            store<i32x2>(kept14_iy_63 + (i4 * 8 + (i5 * 4 + (i6 * 2 + i8))), total.a0);
          }
        }
      }
    }
  }
  // t4.py:9
  {
    for (i32 i4 = 0; i4 < 32; ++i4) {
      for (i32 i5 = 0; i5 < 2; ++i5) {
        for (i32 i6 = 0; i6 < 2; ++i6) {
          for (i32 i7 = 0; i7 < 2; ++i7) {
            const i32 ret_71 = i5 ^ i7;
            auto chunk = [&](i32 i8) LOOM_ALWAYS -> combine_6<2> {
              const f32x2 ret_61 = load<f32x2>(kept12_ret_61 + (i4 * 16 + (i5 * 8 + (i6 * 4 + (i7 * 2 + i8)))));
              const i32x2 ix_62 = load<i32x2>(kept13_ix_62 + (i4 * 16 + (i5 * 8 + (i6 * 4 + (i7 * 2 + i8)))));
              const i32x2 iy_63 = load<i32x2>(kept14_iy_63 + (i4 * 8 + (i5 * 4 + (i6 * 2 + i8))));
              const i32x2 iy_66 = ix_62 ^ iy_63;
              const f32x2 y_67 = bits<f32x2>(iy_66);
              const i32x2 ret_68 = mask(ret_61 > y_67);
              const i32x2 ret_72 = convert<i32x2>(ret_68 & 1);
              const i32x2 ret_74 = mask(ret_72 != splat<i32x2>(ret_71));
              const f32x2 ret_75 = select(ret_74, y_67, ret_61);
              store<f32x2>(kept15_ret_75 + (i4 * 16 + (i5 * 8 + (i6 * 4 + (i7 * 2 + i8)))), ret_75);
              const i32x2 ix_76 = bits<i32x2>(ret_75);
              store<i32x2>(kept16_ix_76 + (i4 * 16 + (i5 * 8 + (i6 * 4 + (i7 * 2 + i8)))), ix_76);
              return {ix_76};
            };
            const auto total = across_lanes(reduce<2, 2>(chunk));
            kept17_iy_77[(i4 * 8 + (i5 * 4 + (i6 * 2 + i7)))] = total.a0;
          }
        }
      }
    }
  }
  // t4.py:9
  {
    for (i32 i4 = 0; i4 < 32; ++i4) {
      for (i32 i7 = 0; i7 < 4; ++i7) {
        for (i32 i8 = 0; i8 < 2; i8 += 2) {
          auto chunk = [&](i32 i5) LOOM_ALWAYS -> combine_7<2> {
            const f32x2 ret_75 = load<f32x2>(kept15_ret_75 + (i4 * 16 + (i5 * 8 + (i7 * 2 + i8))));
            const i32x2 ix_76 = load<i32x2>(kept16_ix_76 + (i4 * 16 + (i5 * 8 + (i7 * 2 + i8))));
            const i32 iy_77 = kept17_iy_77[(i4 * 8 + (i5 * 4 + i7))];
            const i32x2 iy_80 = ix_76 ^ splat<i32x2>(iy_77);
            const f32x2 y_81 = bits<f32x2>(iy_80);
            const i32x2 ret_82 = mask(ret_75 > y_81);
            const i32x2 ret_86 = convert<i32x2>(ret_82 & 1);
            const i32x2 ret_85 = splat<i32x2>(i5) ^ ramp<i32x2>(i8, 1);
            const i32x2 ret_88 = mask(ret_86 != ret_85);
            const f32x2 ret_89 = select(ret_88, y_81, ret_75);
            return {ret_89};
          };
          const auto total = reduce<1, 2>(chunk);
          store<f32x2>(kept18_h_90 + (i4 * 8 + (i7 * 2 + i8)), total.a0);
        }
      }
    }
  }
  // t4.py:9
  {
    for (i32 i4 = 0; i4 < 32; ++i4) {
      for (i32 i7 = 0; i7 < 4; i7 += 4) {
        auto chunk = [&](i32 i5) LOOM_ALWAYS -> combine_8<4> {
          const f32x4 h_90 = load<f32x4>(kept18_h_90 + (i4 * 8 + (i5 * 4 + i7)));
          const i32x4 ix_92 = bits<i32x4>(h_90);
          return {ix_92};
        };
        const auto total = reduce<1, 2>(chunk);
        store<i32x4>(kept19_iy_93 + (i4 * 4 + i7), total.a0);
      }
    }
  }
  // t4.py:9
  {
    for (i32 i3 = 0; i3 < 16; ++i3) {
      for (i32 i4 = 0; i4 < 2; ++i4) {
        for (i32 i5 = 0; i5 < 2; ++i5) {
          const i32 ret_102 = i4 ^ i5;
          for (i32 i7 = 0; i7 < 2; i7 += 2) {
            auto chunk = [&](i32 i6) LOOM_ALWAYS -> combine_9<2> {
              const f32x2 h_90 = load<f32x2>(kept18_h_90 + (i3 * 16 + (i4 * 8 + (i5 * 4 + (i6 * 2 + i7)))));
              const i32x2 ix_92 = bits<i32x2>(h_90);
              const i32x2 iy_93 = load<i32x2>(kept19_iy_93 + (i3 * 8 + (i4 * 4 + (i6 * 2 + i7))));
              const i32x2 iy_96 = ix_92 ^ iy_93;
              const f32x2 y_97 = bits<f32x2>(iy_96);
              const i32x2 ret_99 = mask(h_90 > y_97);
              const i32x2 ret_103 = convert<i32x2>(ret_99 & 1);
              const i32x2 ret_105 = mask(ret_103 != splat<i32x2>(ret_102));
              const f32x2 ret_106 = select(ret_105, y_97, h_90);
              store<f32x2>(kept20_ret_106 + (i3 * 16 + (i4 * 8 + (i5 * 4 + (i6 * 2 + i7)))), ret_106);
              const i32x2 ix_107 = bits<i32x2>(ret_106);
              store<i32x2>(kept21_ix_107 + (i3 * 16 + (i4 * 8 + (i5 * 4 + (i6 * 2 + i7)))), ix_107);
              return {ix_107};
            };
            const auto total = reduce<1, 2>(chunk);
            store<i32x2>(kept22_iy_108 + (i3 * 8 + (i4 * 4 + (i5 * 2 + i7))), total.a0);
          }
        }
      }
    }
  }
  // t4.py:9
  {
    for (i32 i3 = 0; i3 < 16; ++i3) {
      for (i32 i4 = 0; i4 < 2; ++i4) {
        for (i32 i5 = 0; i5 < 2; ++i5) {
          for (i32 i6 = 0; i6 < 2; ++i6) {
            const i32 ret_117 = i4 ^ i6;
            auto chunk = [&](i32 i7) LOOM_ALWAYS -> combine_10<2> {
              const f32x2 ret_106 = load<f32x2>(kept20_ret_106 + (i3 * 16 + (i4 * 8 + (i5 * 4 + (i6 * 2 + i7)))));
              const i32x2 ix_107 = load<i32x2>(kept21_ix_107 + (i3 * 16 + (i4 * 8 + (i5 * 4 + (i6 * 2 + i7)))));
              const i32x2 iy_108 = load<i32x2>(kept22_iy_108 + (i3 * 8 + (i4 * 4 + (i5 * 2 + i7))));
              const i32x2 iy_111 = ix_107 ^ iy_108;
              const f32x2 y_112 = bits<f32x2>(iy_111);
              const i32x2 ret_114 = mask(ret_106 > y_112);
              const i32x2 ret_118 = convert<i32x2>(ret_114 & 1);
              const i32x2 ret_120 = mask(ret_118 != splat<i32x2>(ret_117));
              const f32x2 ret_121 = select(ret_120, y_112, ret_106);
              store<f32x2>(kept23_ret_121 + (i3 * 16 + (i4 * 8 + (i5 * 4 + (i6 * 2 + i7)))), ret_121);
              const i32x2 ix_122 = bits<i32x2>(ret_121);
              store<i32x2>(kept24_ix_122 + (i3 * 16 + (i4 * 8 + (i5 * 4 + (i6 * 2 + i7)))), ix_122);
              return {ix_122};
            };
            const auto total = across_lanes(reduce<2, 2>(chunk));
            kept25_iy_123[(i3 * 8 + (i4 * 4 + (i5 * 2 + i6)))] = total.a0;
          }
        }
      }
    }
  }
  // t4.py:9
  {
    for (i32 i3 = 0; i3 < 16; ++i3) {
      for (i32 i6 = 0; i6 < 4; ++i6) {
        for (i32 i7 = 0; i7 < 2; i7 += 2) {
          auto chunk = [&](i32 i4) LOOM_ALWAYS -> combine_11<2> {
            const f32x2 ret_121 = load<f32x2>(kept23_ret_121 + (i3 * 16 + (i4 * 8 + (i6 * 2 + i7))));
            const i32x2 ix_122 = load<i32x2>(kept24_ix_122 + (i3 * 16 + (i4 * 8 + (i6 * 2 + i7))));
            const i32 iy_123 = kept25_iy_123[(i3 * 8 + (i4 * 4 + i6))];
            const i32x2 iy_126 = ix_122 ^ splat<i32x2>(iy_123);
            const f32x2 y_127 = bits<f32x2>(iy_126);
            const i32x2 ret_129 = mask(ret_121 > y_127);
            const i32x2 ret_133 = convert<i32x2>(ret_129 & 1);
            const i32x2 ret_132 = splat<i32x2>(i4) ^ ramp<i32x2>(i7, 1);
            const i32x2 ret_135 = mask(ret_133 != ret_132);
            const f32x2 ret_136 = select(ret_135, y_127, ret_121);
            return {ret_136};
          };
          const auto total = reduce<1, 2>(chunk);
          store<f32x2>(kept26_h_137 + (i3 * 8 + (i6 * 2 + i7)), total.a0);
        }
      }
    }
  }
  // t4.py:9
  {
    for (i32 i3 = 0; i3 < 16; ++i3) {
      for (i32 i6 = 0; i6 < 4; i6 += 4) {
        auto chunk = [&](i32 i4) LOOM_ALWAYS -> combine_12<4> {
          const f32x4 h_137 = load<f32x4>(kept26_h_137 + (i3 * 8 + (i4 * 4 + i6)));
          const i32x4 ix_139 = bits<i32x4>(h_137);
          return {ix_139};
        };
        const auto total = reduce<1, 2>(chunk);
        store<i32x4>(kept27_iy_140 + (i3 * 4 + i6), total.a0);
      }
    }
  }
  // t4.py:9
  {
    for (i32 i2 = 0; i2 < 8; ++i2) {
      for (i32 i3 = 0; i3 < 2; ++i3) {
        for (i32 i4 = 0; i4 < 2; ++i4) {
          const i32 ret_149 = i3 ^ i4;
          for (i32 i6 = 0; i6 < 2; i6 += 2) {
            auto chunk = [&](i32 i5) LOOM_ALWAYS -> combine_13<2> {
              const f32x2 h_137 = load<f32x2>(kept26_h_137 + (i2 * 16 + (i3 * 8 + (i4 * 4 + (i5 * 2 + i6)))));
              const i32x2 ix_139 = bits<i32x2>(h_137);
              const i32x2 iy_140 = load<i32x2>(kept27_iy_140 + (i2 * 8 + (i3 * 4 + (i5 * 2 + i6))));
              const i32x2 iy_143 = ix_139 ^ iy_140;
              const f32x2 y_144 = bits<f32x2>(iy_143);
              const i32x2 ret_146 = mask(h_137 > y_144);
              const i32x2 ret_150 = convert<i32x2>(ret_146 & 1);
              const i32x2 ret_152 = mask(ret_150 != splat<i32x2>(ret_149));
              const f32x2 ret_153 = select(ret_152, y_144, h_137);
              store<f32x2>(kept28_ret_153 + (i2 * 16 + (i3 * 8 + (i4 * 4 + (i5 * 2 + i6)))), ret_153);
              const i32x2 ix_154 = bits<i32x2>(ret_153);
              store<i32x2>(kept29_ix_154 + (i2 * 16 + (i3 * 8 + (i4 * 4 + (i5 * 2 + i6)))), ix_154);
              return {ix_154};
            };
            const auto total = reduce<1, 2>(chunk);
            store<i32x2>(kept30_iy_155 + (i2 * 8 + (i3 * 4 + (i4 * 2 + i6))), total.a0);
          }
        }
      }
    }
  }
  // t4.py:9
  {
    for (i32 i2 = 0; i2 < 8; ++i2) {
      for (i32 i3 = 0; i3 < 2; ++i3) {
        for (i32 i4 = 0; i4 < 2; ++i4) {
          for (i32 i5 = 0; i5 < 2; ++i5) {
            const i32 ret_164 = i3 ^ i5;
            auto chunk = [&](i32 i6) LOOM_ALWAYS -> combine_14<2> {
              const f32x2 ret_153 = load<f32x2>(kept28_ret_153 + (i2 * 16 + (i3 * 8 + (i4 * 4 + (i5 * 2 + i6)))));
              const i32x2 ix_154 = load<i32x2>(kept29_ix_154 + (i2 * 16 + (i3 * 8 + (i4 * 4 + (i5 * 2 + i6)))));
              const i32x2 iy_155 = load<i32x2>(kept30_iy_155 + (i2 * 8 + (i3 * 4 + (i4 * 2 + i6))));
              const i32x2 iy_158 = ix_154 ^ iy_155;
              const f32x2 y_159 = bits<f32x2>(iy_158);
              const i32x2 ret_161 = mask(ret_153 > y_159);
              const i32x2 ret_165 = convert<i32x2>(ret_161 & 1);
              const i32x2 ret_167 = mask(ret_165 != splat<i32x2>(ret_164));
              const f32x2 ret_168 = select(ret_167, y_159, ret_153);
              store<f32x2>(kept31_ret_168 + (i2 * 16 + (i3 * 8 + (i4 * 4 + (i5 * 2 + i6)))), ret_168);
              const i32x2 ix_169 = bits<i32x2>(ret_168);
              store<i32x2>(kept32_ix_169 + (i2 * 16 + (i3 * 8 + (i4 * 4 + (i5 * 2 + i6)))), ix_169);
              return {ix_169};
            };
            const auto total = across_lanes(reduce<2, 2>(chunk));
            kept33_iy_170[(i2 * 8 + (i3 * 4 + (i4 * 2 + i5)))] = total.a0;
          }
        }
      }
    }
  }
  // t4.py:9
  {
    for (i32 i2 = 0; i2 < 8; ++i2) {
      for (i32 i5 = 0; i5 < 4; ++i5) {
        for (i32 i6 = 0; i6 < 2; i6 += 2) {
          auto chunk = [&](i32 i3) LOOM_ALWAYS -> combine_15<2> {
            const f32x2 ret_168 = load<f32x2>(kept31_ret_168 + (i2 * 16 + (i3 * 8 + (i5 * 2 + i6))));
            const i32x2 ix_169 = load<i32x2>(kept32_ix_169 + (i2 * 16 + (i3 * 8 + (i5 * 2 + i6))));
            const i32 iy_170 = kept33_iy_170[(i2 * 8 + (i3 * 4 + i5))];
            const i32x2 iy_173 = ix_169 ^ splat<i32x2>(iy_170);
            const f32x2 y_174 = bits<f32x2>(iy_173);
            const i32x2 ret_176 = mask(ret_168 > y_174);
            const i32x2 ret_180 = convert<i32x2>(ret_176 & 1);
            const i32x2 ret_179 = splat<i32x2>(i3) ^ ramp<i32x2>(i6, 1);
            const i32x2 ret_182 = mask(ret_180 != ret_179);
            const f32x2 ret_183 = select(ret_182, y_174, ret_168);
            return {ret_183};
          };
          const auto total = reduce<1, 2>(chunk);
          store<f32x2>(kept34_h_184 + (i2 * 8 + (i5 * 2 + i6)), total.a0);
        }
      }
    }
  }
  // t4.py:9
  {
    for (i32 i2 = 0; i2 < 8; ++i2) {
      for (i32 i5 = 0; i5 < 4; i5 += 4) {
        auto chunk = [&](i32 i3) LOOM_ALWAYS -> combine_16<4> {
          const f32x4 h_184 = load<f32x4>(kept34_h_184 + (i2 * 8 + (i3 * 4 + i5)));
          const i32x4 ix_186 = bits<i32x4>(h_184);
          return {ix_186};
        };
        const auto total = reduce<1, 2>(chunk);
        store<i32x4>(kept35_iy_187 + (i2 * 4 + i5), total.a0);
      }
    }
  }
  // t4.py:9
  {
    for (i32 i1 = 0; i1 < 4; ++i1) {
      for (i32 i2 = 0; i2 < 2; ++i2) {
        for (i32 i3 = 0; i3 < 2; ++i3) {
          const i32 ret_196 = i2 ^ i3;
          for (i32 i5 = 0; i5 < 2; i5 += 2) {
            auto chunk = [&](i32 i4) LOOM_ALWAYS -> combine_17<2> {
              const f32x2 h_184 = load<f32x2>(kept34_h_184 + (i1 * 16 + (i2 * 8 + (i3 * 4 + (i4 * 2 + i5)))));
              const i32x2 ix_186 = bits<i32x2>(h_184);
              const i32x2 iy_187 = load<i32x2>(kept35_iy_187 + (i1 * 8 + (i2 * 4 + (i4 * 2 + i5))));
              const i32x2 iy_190 = ix_186 ^ iy_187;
              const f32x2 y_191 = bits<f32x2>(iy_190);
              const i32x2 ret_193 = mask(h_184 > y_191);
              const i32x2 ret_197 = convert<i32x2>(ret_193 & 1);
              const i32x2 ret_199 = mask(ret_197 != splat<i32x2>(ret_196));
              const f32x2 ret_200 = select(ret_199, y_191, h_184);
              store<f32x2>(kept36_ret_200 + (i1 * 16 + (i2 * 8 + (i3 * 4 + (i4 * 2 + i5)))), ret_200);
              const i32x2 ix_201 = bits<i32x2>(ret_200);
              store<i32x2>(kept37_ix_201 + (i1 * 16 + (i2 * 8 + (i3 * 4 + (i4 * 2 + i5)))), ix_201);
              return {ix_201};
            };
            const auto total = reduce<1, 2>(chunk);
            store<i32x2>(kept38_iy_202 + (i1 * 8 + (i2 * 4 + (i3 * 2 + i5))), total.a0);
          }
        }
      }
    }
  }
  // t4.py:9
  {
    for (i32 i1 = 0; i1 < 4; ++i1) {
      for (i32 i2 = 0; i2 < 2; ++i2) {
        for (i32 i3 = 0; i3 < 2; ++i3) {
          for (i32 i4 = 0; i4 < 2; ++i4) {
            const i32 ret_211 = i2 ^ i4;
            auto chunk = [&](i32 i5) LOOM_ALWAYS -> combine_18<2> {
              const f32x2 ret_200 = load<f32x2>(kept36_ret_200 + (i1 * 16 + (i2 * 8 + (i3 * 4 + (i4 * 2 + i5)))));
              const i32x2 ix_201 = load<i32x2>(kept37_ix_201 + (i1 * 16 + (i2 * 8 + (i3 * 4 + (i4 * 2 + i5)))));
              const i32x2 iy_202 = load<i32x2>(kept38_iy_202 + (i1 * 8 + (i2 * 4 + (i3 * 2 + i5))));
              const i32x2 iy_205 = ix_201 ^ iy_202;
              const f32x2 y_206 = bits<f32x2>(iy_205);
              const i32x2 ret_208 = mask(ret_200 > y_206);
              const i32x2 ret_212 = convert<i32x2>(ret_208 & 1);
              const i32x2 ret_214 = mask(ret_212 != splat<i32x2>(ret_211));
              const f32x2 ret_215 = select(ret_214, y_206, ret_200);
              store<f32x2>(kept39_ret_215 + (i1 * 16 + (i2 * 8 + (i3 * 4 + (i4 * 2 + i5)))), ret_215);
              const i32x2 ix_216 = bits<i32x2>(ret_215);
              store<i32x2>(kept40_ix_216 + (i1 * 16 + (i2 * 8 + (i3 * 4 + (i4 * 2 + i5)))), ix_216);
              return {ix_216};
            };
            const auto total = across_lanes(reduce<2, 2>(chunk));
            kept41_iy_217[(i1 * 8 + (i2 * 4 + (i3 * 2 + i4)))] = total.a0;
          }
        }
      }
    }
  }
  // t4.py:9
  {
    for (i32 i1 = 0; i1 < 4; ++i1) {
      for (i32 i4 = 0; i4 < 4; ++i4) {
        for (i32 i5 = 0; i5 < 2; i5 += 2) {
          auto chunk = [&](i32 i2) LOOM_ALWAYS -> combine_19<2> {
            const f32x2 ret_215 = load<f32x2>(kept39_ret_215 + (i1 * 16 + (i2 * 8 + (i4 * 2 + i5))));
            const i32x2 ix_216 = load<i32x2>(kept40_ix_216 + (i1 * 16 + (i2 * 8 + (i4 * 2 + i5))));
            const i32 iy_217 = kept41_iy_217[(i1 * 8 + (i2 * 4 + i4))];
            const i32x2 iy_220 = ix_216 ^ splat<i32x2>(iy_217);
            const f32x2 y_221 = bits<f32x2>(iy_220);
            const i32x2 ret_223 = mask(ret_215 > y_221);
            const i32x2 ret_227 = convert<i32x2>(ret_223 & 1);
            const i32x2 ret_226 = splat<i32x2>(i2) ^ ramp<i32x2>(i5, 1);
            const i32x2 ret_229 = mask(ret_227 != ret_226);
            const f32x2 ret_230 = select(ret_229, y_221, ret_215);
            return {ret_230};
          };
          const auto total = reduce<1, 2>(chunk);
          store<f32x2>(kept42_h_231 + (i1 * 8 + (i4 * 2 + i5)), total.a0);
        }
      }
    }
  }
  // t4.py:9
  {
    for (i32 i1 = 0; i1 < 4; ++i1) {
      for (i32 i4 = 0; i4 < 4; i4 += 4) {
        auto chunk = [&](i32 i2) LOOM_ALWAYS -> combine_20<4> {
          const f32x4 h_231 = load<f32x4>(kept42_h_231 + (i1 * 8 + (i2 * 4 + i4)));
          const i32x4 ix_232 = bits<i32x4>(h_231);
          return {ix_232};
        };
        const auto total = reduce<1, 2>(chunk);
        store<i32x4>(kept43_iy_233 + (i1 * 4 + i4), total.a0);
      }
    }
  }
  // t4.py:9
  {
    for (i32 i1 = 0; i1 < 4; ++i1) {
      for (i32 i2 = 0; i2 < 2; ++i2) {
        const i32 ret_240 = i2 ^ 1;
        for (i32 i4 = 0; i4 < 2; i4 += 2) {
          auto chunk = [&](i32 i3) LOOM_ALWAYS -> combine_21<2> {
            const f32x2 h_231 = load<f32x2>(kept42_h_231 + (i1 * 8 + (i2 * 4 + (i3 * 2 + i4))));
            const i32x2 ix_232 = bits<i32x2>(h_231);
            const i32x2 iy_233 = load<i32x2>(kept43_iy_233 + (i1 * 4 + (i3 * 2 + i4)));
            const i32x2 iy_236 = ix_232 ^ iy_233;
            const f32x2 y_237 = bits<f32x2>(iy_236);
            const i32x2 ret_239 = mask(h_231 > y_237);
            const i32x2 ret_241 = convert<i32x2>(ret_239 & 1);
            const i32x2 ret_243 = mask(ret_241 != splat<i32x2>(ret_240));
            const f32x2 ret_244 = select(ret_243, y_237, h_231);
            store<f32x2>(kept44_ret_244 + (i1 * 8 + (i2 * 4 + (i3 * 2 + i4))), ret_244);
            const i32x2 ix_245 = bits<i32x2>(ret_244);
            store<i32x2>(kept45_ix_245 + (i1 * 8 + (i2 * 4 + (i3 * 2 + i4))), ix_245);
            return {ix_245};
          };
          const auto total = reduce<1, 2>(chunk);
          store<i32x2>(kept46_iy_246 + (i1 * 4 + (i2 * 2 + i4)), total.a0);
        }
      }
    }
  }
  // t4.py:9
  {
    for (i32 i2 = 0; i2 < 8; ++i2) {
      for (i32 i3 = 0; i3 < 2; ++i3) {
        const i32 ret_253 = i3 ^ 1;
        auto chunk = [&](i32 i4) LOOM_ALWAYS -> combine_22<2> {
          const f32x2 ret_244 = load<f32x2>(kept44_ret_244 + (i2 * 4 + (i3 * 2 + i4)));
          const i32x2 ix_245 = load<i32x2>(kept45_ix_245 + (i2 * 4 + (i3 * 2 + i4)));
          const i32x2 iy_246 = load<i32x2>(kept46_iy_246 + (i2 * 2 + i4));
          const i32x2 iy_249 = ix_245 ^ iy_246;
          const f32x2 y_250 = bits<f32x2>(iy_249);
          const i32x2 ret_252 = mask(ret_244 > y_250);
          const i32x2 ret_254 = convert<i32x2>(ret_252 & 1);
          const i32x2 ret_256 = mask(ret_254 != splat<i32x2>(ret_253));
          const f32x2 ret_257 = select(ret_256, y_250, ret_244);
          store<f32x2>(kept47_ret_257 + (i2 * 4 + (i3 * 2 + i4)), ret_257);
          const i32x2 ix_258 = bits<i32x2>(ret_257);
          store<i32x2>(kept48_ix_258 + (i2 * 4 + (i3 * 2 + i4)), ix_258);
          return {ix_258};
        };
        const auto total = across_lanes(reduce<2, 2>(chunk));
        kept49_iy_259[(i2 * 2 + i3)] = total.a0;
      }
    }
  }
  // t4.py:9
  // t4.py:9
  {
    for (i32 i3 = 0; i3 < 16; ++i3) {
      const i32 iy_259 = kept49_iy_259[i3];
      for (i32 i4 = 0; i4 < 2; i4 += 2) {
        const f32x2 ret_257 = load<f32x2>(kept47_ret_257 + (i3 * 2 + i4));
        const i32x2 ix_258 = load<i32x2>(kept48_ix_258 + (i3 * 2 + i4));
        const i32x2 iy_262 = ix_258 ^ splat<i32x2>(iy_259);
        const f32x2 y_263 = bits<f32x2>(iy_262);
        const i32x2 ret_265 = mask(ret_257 > y_263);
        const i32x2 ret_267 = convert<i32x2>(ret_265 & 1);
        const i32x2 ret_266 = ramp<i32x2>(i4, 1) ^ splat<i32x2>(1);
        const i32x2 ret_269 = mask(ret_267 != ret_266);
        const f32x2 ret_270 = select(ret_269, y_263, ret_257);
        store<f32x2>(kept50_ret_270 + (i3 * 2 + i4), ret_270);
      }
    }
  }
  {
    for (i32 i0 = 0; i0 < 4; ++i0) {
      const i32 v0 = i0 * 8;
      f32 *const v2 = o_ptr + v0;
      for (i32 i1 = 0; i1 < 8; i1 += 8) {
        f32 *const v7 = v2 + i1;
        const f32x8 x = load<f32x8>(kept50_ret_270 + (i0 * 8 + i1));
        store<f32x8>((f32 *)v7, x);
      }
    }
  }
  return;
}

LOOM_KERNEL(topk, Args, program, 41280)
