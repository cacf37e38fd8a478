// Sixteen lanes in four registers of NEON. See lanes.h, which says what the functions do.
#pragma once
#include <arm_neon.h>

constexpr int WIDEST = 16, TALLEST = 5;
struct Ints {
  int32x4_t part[4];
};
struct Floats {
  float32x4_t part[4];
};

// The same of every part.
template <typename To, typename Part>
ALWAYS To by_parts(Part part) {
  return {part(0), part(1), part(2), part(3)};
}

ALWAYS Ints all_ints(int32_t v) { return by_parts<Ints>([&](int) { return vdupq_n_s32(v); }); }
ALWAYS Floats all_floats(float v) { return by_parts<Floats>([&](int) { return vdupq_n_f32(v); }); }
ALWAYS Floats load_floats(const float* at) { return by_parts<Floats>([&](int i) { return vld1q_f32(at + 4 * i); }); }
ALWAYS Ints load_packed(const void* at) {
  return by_parts<Ints>([&](int i) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)at + 16 * i)); });
}

ALWAYS Ints add(Ints a, Ints b) { return by_parts<Ints>([&](int i) { return vaddq_s32(a.part[i], b.part[i]); }); }
ALWAYS Ints subtract(Ints a, Ints b) { return by_parts<Ints>([&](int i) { return vsubq_s32(a.part[i], b.part[i]); }); }
template <int N>
ALWAYS Ints shift_right(Ints a) {
  return by_parts<Ints>([&](int i) { return vshrq_n_s32(a.part[i], N); });
}
ALWAYS Ints times(Ints a, int32_t b) {
  return by_parts<Ints>([&](int i) { return vmulq_n_s32(a.part[i], b); });
}
ALWAYS Ints larger(Ints a, Ints b) { return by_parts<Ints>([&](int i) { return vmaxq_s32(a.part[i], b.part[i]); }); }
ALWAYS Ints smaller(Ints a, Ints b) { return by_parts<Ints>([&](int i) { return vminq_s32(a.part[i], b.part[i]); }); }
ALWAYS Floats larger(Floats a, Floats b) {
  return by_parts<Floats>([&](int i) { return vmaxq_f32(a.part[i], b.part[i]); });
}
ALWAYS Floats smaller(Floats a, Floats b) {
  return by_parts<Floats>([&](int i) { return vminq_f32(a.part[i], b.part[i]); });
}
ALWAYS Floats multiply(Floats a, Floats b) {
  return by_parts<Floats>([&](int i) { return vmulq_f32(a.part[i], b.part[i]); });
}
ALWAYS Floats add(Floats a, Floats b) {
  return by_parts<Floats>([&](int i) { return vaddq_f32(a.part[i], b.part[i]); });
}
ALWAYS Floats divide(Floats a, Floats b) {
  return by_parts<Floats>([&](int i) { return vdivq_f32(a.part[i], b.part[i]); });
}
ALWAYS Floats to_floats(Ints a) { return by_parts<Floats>([&](int i) { return vcvtq_f32_s32(a.part[i]); }); }
ALWAYS Ints to_ints(Floats a) { return by_parts<Ints>([&](int i) { return vcvtnq_s32_f32(a.part[i]); }); }

ALWAYS Ints load_16(const int16_t* at, All) {
  return by_parts<Ints>([&](int i) { return vmovl_s16(vld1_s16(at + 4 * i)); });
}
ALWAYS Ints from_words(int16x8_t low, int16x8_t high) {
  return {vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
}
ALWAYS Ints load_16(const uint8_t* at, All) {
  const uint8x16_t bytes = vld1q_u8(at);
  return from_words(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes))), vreinterpretq_s16_u16(vmovl_high_u8(bytes)));
}
ALWAYS Ints load_16(const int8_t* at, All) {
  const int8x16_t bytes = vld1q_s8(at);
  return from_words(vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
}
ALWAYS Ints load_16(const int32_t* at, All) { return load_packed(at); }
// Pairs of parts as words, of which each keeps its low one.
ALWAYS int16x8_t to_words(Ints q, int i) { return vmovn_high_s32(vmovn_s32(q.part[2 * i]), q.part[2 * i + 1]); }
ALWAYS void store_16(uint8_t* at, Ints q, All) {
  vst1q_s8((int8_t*)at, vmovn_high_s16(vmovn_s16(to_words(q, 0)), to_words(q, 1)));
}
ALWAYS void store_16(int16_t* at, Ints q, All) {
  vst1q_s16(at, to_words(q, 0));
  vst1q_s16(at + 8, to_words(q, 1));
}
ALWAYS void store_16(int32_t* at, Ints q, All) {
  for (int i = 0; i < 4; ++i) vst1q_s32(at + 4 * i, q.part[i]);
}
ALWAYS void store_16(float* at, Floats v, All) {
  for (int i = 0; i < 4; ++i) vst1q_f32(at + 4 * i, v.part[i]);
}

ALWAYS Ints doubling_high(Ints c, Ints m) {
  return by_parts<Ints>([&](int i) { return vqrdmulhq_s32(c.part[i], m.part[i]); });
}
ALWAYS Ints multiply_shift(Ints c, Ints m, Ints n) {
  return by_parts<Ints>([&](int i) {
    const int32x4_t x = c.part[i], y = m.part[i], by = vnegq_s32(n.part[i]);
    const int64x2_t low = vrshlq_s64(vmull_s32(vget_low_s32(x), vget_low_s32(y)), vmovl_s32(vget_low_s32(by)));
    const int64x2_t high = vrshlq_s64(vmull_high_s32(x, y), vmovl_high_s32(by));
    return vmovn_high_s64(vmovn_s64(low), high);
  });
}
ALWAYS Ints shift_away(Ints h, Ints n) {
  return by_parts<Ints>([&](int i) {
    const int32x4_t by = vnegq_s32(n.part[i]), x = h.part[i];
    return vrshlq_s32(vqaddq_s32(x, vshrq_n_s32(vandq_s32(x, by), 31)), by);  // halves of negative ones down
  });
}

ALWAYS void widen_8(int16x8_t words, int16_t zero, int16_t* to) { vst1q_s16(to, vsubq_s16(words, vdupq_n_s16(zero))); }
ALWAYS void widen_32(const uint8_t* from, int16_t zero, int16_t* to) {
  for (int i = 0; i < 32; i += 8) widen_8(vreinterpretq_s16_u16(vmovl_u8(vld1_u8(from + i))), zero, to + i);
}
ALWAYS void widen_32(const int8_t* from, int16_t zero, int16_t* to) {
  for (int i = 0; i < 32; i += 8) widen_8(vmovl_s8(vld1_s8(from + i)), zero, to + i);
}

using Vec = int32x4_t;
ALWAYS Vec load_vec(const void* at) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)at)); }
ALWAYS void store_vec(void* at, Vec q) { vst1q_s32((int32_t*)at, q); }
ALWAYS Vec add_vec(Vec a, Vec b) { return vaddq_s32(a, b); }
ALWAYS Vec dot_vec(Vec sum, Vec a, Vec b) {
  const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
  const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
  return vaddq_s32(sum, vpaddq_s32(low, high));
}
// By the first words of all pairs and by the second, which a tile takes apart once for all of its products.
ALWAYS Ints dot_words(Ints sum, Ints a, Ints b) {
  return by_parts<Ints>([&](int i) {
    const int32x4_t x = a.part[i], y = b.part[i];
    const int32x4_t first = vmlal_s16(sum.part[i], vmovn_s32(x), vmovn_s32(y));
    return vmlal_s16(first, vshrn_n_s32(x, 16), vshrn_n_s32(y, 16));
  });
}
ALWAYS Vec all_words(int16_t v) { return vreinterpretq_s32_s16(vdupq_n_s16(v)); }
ALWAYS Vec add_words(Vec a, Vec b) {
  return vreinterpretq_s32_s16(vaddq_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
}
ALWAYS Vec subtract_words(Vec a, Vec b) {
  return vreinterpretq_s32_s16(vsubq_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
}
ALWAYS Vec widen_vec(const uint8_t* at) { return vreinterpretq_s32_u16(vmovl_u8(vld1_u8(at))); }
ALWAYS Vec widen_vec(const int8_t* at) { return vreinterpretq_s32_s16(vmovl_s8(vld1_s8(at))); }
ALWAYS void interleave(Vec a, Vec b, Vec& first, Vec& second) {
  const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
  first = vreinterpretq_s32_s16(vzip1q_s16(x, y));
  second = vreinterpretq_s32_s16(vzip2q_s16(x, y));
}
ALWAYS void put_in_order(Vec&, Vec&) {}

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr Dots DOTS_BYTES = EXACTLY;
constexpr bool TURNS_UNSIGNED = false;
ALWAYS Ints dot_bytes(Ints sum, Ints a, Ints b) {
  return by_parts<Ints>([&](int i) {
    return vusdotq_s32(sum.part[i], vreinterpretq_u8_s32(a.part[i]), vreinterpretq_s8_s32(b.part[i]));
  });
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr Dots DOTS_BYTES = EXACTLY;
constexpr bool TURNS_UNSIGNED = true;
ALWAYS Ints dot_bytes(Ints sum, Ints a, Ints b) {
  return by_parts<Ints>([&](int i) {
    return vdotq_s32(sum.part[i], vreinterpretq_s8_s32(a.part[i]), vreinterpretq_s8_s32(b.part[i]));
  });
}
#else
constexpr Dots DOTS_BYTES = NEVER;
constexpr bool TURNS_UNSIGNED = false;
ALWAYS Ints dot_bytes(Ints sum, Ints, Ints) { return sum; }
#endif
ALWAYS Ints turn(Ints a) {
  return by_parts<Ints>([&](int i) {
    return vreinterpretq_s32_u8(veorq_u8(vreinterpretq_u8_s32(a.part[i]), vdupq_n_u8(0x80)));
  });
}
