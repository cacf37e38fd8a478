// Sixteen lanes in a vector of the compiler, which splits it into the registers that there are. See lanes.h, which says
// what the functions do.
#pragma once

constexpr int WIDEST = 16, TALLEST = 2;
typedef int32_t Ints __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

ALWAYS Ints all_ints(int32_t v) { return v - Ints{}; }
ALWAYS Floats all_floats(float v) { return v - Floats{}; }
ALWAYS Floats load_floats(const float* at) {
  Floats v;
  std::memcpy(&v, at, sizeof(v));
  return v;
}
ALWAYS Ints load_packed(const void* at) {
  Ints v;
  std::memcpy(&v, at, sizeof(v));
  return v;
}

typedef uint32_t Unsigned __attribute__((vector_size(64)));
ALWAYS Ints add(Ints a, Ints b) { return (Ints)((Unsigned)a + (Unsigned)b); }
ALWAYS Ints subtract(Ints a, Ints b) { return (Ints)((Unsigned)a - (Unsigned)b); }
template <int N>
ALWAYS Ints shift_right(Ints a) {
  return a >> N;
}
ALWAYS Ints times(Ints a, int32_t b) { return (Ints)((Unsigned)a * (uint32_t)b); }
ALWAYS Ints larger(Ints a, Ints b) { return a > b ? a : b; }
ALWAYS Ints smaller(Ints a, Ints b) { return a < b ? a : b; }
ALWAYS Floats larger(Floats a, Floats b) { return a > b ? a : b; }
ALWAYS Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
ALWAYS Floats multiply(Floats a, Floats b) { return a * b; }
ALWAYS Floats add(Floats a, Floats b) { return a + b; }
ALWAYS Floats divide(Floats a, Floats b) { return a / b; }
ALWAYS Floats to_floats(Ints a) { return __builtin_convertvector(a, Floats); }
ALWAYS Ints to_ints(Floats a) {
  Ints q;
  for (int i = 0; i < LANES; ++i) q[i] = (int32_t)__builtin_rintf(a[i]);
  return q;
}

template <typename T>
ALWAYS Ints load_16(const T* at, All) {
  T there[LANES];
  std::memcpy(there, at, sizeof(there));
  Ints v;
  for (int i = 0; i < LANES; ++i) v[i] = there[i];
  return v;
}
template <typename T>
ALWAYS void store_16(T* at, Ints q, All) {
  T there[LANES];
  for (int i = 0; i < LANES; ++i) there[i] = (T)q[i];
  std::memcpy(at, there, sizeof(there));
}
ALWAYS void store_16(float* at, Floats v, All) { std::memcpy(at, &v, sizeof(v)); }

ALWAYS Ints dot_words(Ints sum, Ints a, Ints b) {
  const Ints low = ((a << 16) >> 16) * ((b << 16) >> 16), high = (a >> 16) * (b >> 16);
  return add(sum, add(low, high));
}

ALWAYS Ints doubling_high(Ints c, Ints m) {
  Ints h;
  for (int i = 0; i < LANES; ++i) h[i] = (int32_t)(((int64_t)c[i] * m[i] + (1 << 30)) >> 31);
  return h;
}
ALWAYS Ints multiply_shift(Ints c, Ints m, Ints n) {
  Ints q;
  for (int i = 0; i < LANES; ++i) q[i] = (int32_t)(((int64_t)c[i] * m[i] + ((int64_t)1 << (n[i] - 1))) >> n[i]);
  return q;
}
ALWAYS Ints shift_away(Ints h, Ints n) {
  const Ints mask = (Ints)(((Unsigned)all_ints(1) << (Unsigned)n) - 1u), half = (mask >> 1) - (h >> 31);
  return (h >> n) - ((h & mask) > half);
}

template <typename T>
ALWAYS void widen_32(const T* from, int16_t zero, int16_t* to) {
  for (int i = 0; i < 32; ++i) to[i] = (int16_t)(from[i] - zero);
}

using Vec = Ints;
ALWAYS Vec load_vec(const void* at) { return load_packed(at); }
ALWAYS void store_vec(void* at, Vec q) { std::memcpy(at, &q, sizeof(q)); }
ALWAYS Vec add_vec(Vec a, Vec b) { return add(a, b); }
ALWAYS Vec dot_vec(Vec sum, Vec a, Vec b) { return dot_words(sum, a, b); }
typedef int16_t Halves __attribute__((vector_size(64)));
ALWAYS Vec all_words(int16_t v) { return (Vec)(v - Halves{}); }
ALWAYS Vec add_words(Vec a, Vec b) { return (Vec)((Halves)a + (Halves)b); }
ALWAYS Vec subtract_words(Vec a, Vec b) { return (Vec)((Halves)a - (Halves)b); }
template <typename T>
ALWAYS Vec widen_vec(const T* at) {
  Halves v;
  for (int i = 0; i < 2 * LANES; ++i) v[i] = at[i];
  return (Vec)v;
}
// The entries of two vectors in another order.
#ifdef __clang__
#define SHUFFLED(a, b, kind, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, kind, ...) __builtin_shuffle(a, b, kind{__VA_ARGS__})
#endif
ALWAYS void interleave(Vec a, Vec b, Vec& first, Vec& second) {
  const Halves x = (Halves)a, y = (Halves)b;
  first = (Ints)SHUFFLED(x, y, Halves, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43,  //
                         16, 48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59);
  second = (Ints)SHUFFLED(x, y, Halves, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47,  //
                          20, 52, 21, 53, 22, 54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63);
}
ALWAYS void put_in_order(Vec& first, Vec& second) {
  const Ints low = SHUFFLED(first, second, Ints, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  second = SHUFFLED(first, second, Ints, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  first = low;
}

constexpr bool TURNS_UNSIGNED = false;
ALWAYS Ints turn(Ints a) { return a ^ all_ints((int32_t)0x80808080); }
#ifdef HAGO_PLAIN_BYTES  // so that what products of bytes need can be tested on any machine
constexpr Dots DOTS_BYTES = EXACTLY;
ALWAYS Ints dot_bytes(Ints sum, Ints a, Ints b) {
  for (int k = 0; k < 4; ++k) {
    const Ints x = (Ints)((Unsigned)a << (24 - 8 * k) >> 24), y = b << (24 - 8 * k) >> 24;
    sum = add(sum, x * y);
  }
  return sum;
}
#else
constexpr Dots DOTS_BYTES = NEVER;
ALWAYS Ints dot_bytes(Ints sum, Ints, Ints) { return sum; }
#endif
