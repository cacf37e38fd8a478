// See rows.h. Plain loops, which the compiler turns into the vectors of the machine.
#include "rows.h"

#include <algorithm>
#include <cstring>

#include "rounding.h"

#if defined(__AVX512F__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

namespace {

template <int ROUNDING>
void by_ratio(const int32_t* __restrict c, int32_t* __restrict out, int n, const Move& m, int channel) {
  const float* __restrict ratio = m.ratio + channel;
  if (m.wide) {
    for (int i = 0; i < n; ++i) {
      const double v = rounded<ROUNDING>((float)c[i] * ratio[i]);
      out[i] = (int32_t)std::min(std::max(v, m.low), m.high);
    }
    return;
  }
  const float low = m.least, high = m.most;
  for (int i = 0; i < n; ++i) {
    float v = rounded<ROUNDING>((float)c[i] * ratio[i]);
    v = v < low ? low : v;
    v = v > high ? high : v;
    out[i] = (int32_t)v;
  }
}

// p / 2**n as a whole number, n from 1 to 62. Shifts of constants are left out: compilers make no vectors of them.
template <int ROUNDING>
inline int64_t shifted(int64_t p, int64_t n) {
  const int64_t up = ((p >> (n - 1)) + 1) >> 1, down = -(((-p >> (n - 1)) + 1) >> 1);  // what they do with a half
  switch (ROUNDING) {
    case HALF_EVEN: return up & 1 ? down : up;
    case HALF_UP: return up;
    case HALF_AWAY: return p < 0 ? down : up;
    case HALF_DOWN: return down;
    case TOWARD_ZERO: return p < 0 ? -(-p >> n) : p >> n;
    default: return p >> n;
  }
}

inline int32_t clipped(int64_t v, int64_t low, int64_t high) { return (int32_t)std::min(std::max(v, low), high); }

template <int ROUNDING>
void by_multiplier(const int32_t* __restrict c, int32_t* __restrict out, int n, const Move& m, int channel) {
  const int32_t *__restrict multiplier = m.multiplier + channel, *__restrict shift = m.shift + channel;
  const int64_t low = (int64_t)m.low, high = (int64_t)m.high;
  for (int i = 0; i < n; ++i)
    out[i] = clipped(shifted<ROUNDING>((int64_t)c[i] * multiplier[i], shift[i]), low, high);
}

// What is shifted further left is at least 2**31 after the product, and saturates.
constexpr int64_t SATURATED = (int64_t)1 << 32;
inline int64_t clipped64(int64_t v, int64_t limit) { return std::min(std::max(v, -limit), limit); }

// N5: a doubling high multiply that rounds half up, then a shift that rounds half away from zero.
void in_two_stages(const int32_t* __restrict c, int32_t* __restrict out, int n, const Move& m, int channel) {
  const int32_t *__restrict multiplier = m.multiplier + channel, *__restrict shift = m.shift + channel;
  const int64_t low = (int64_t)m.low, high = (int64_t)m.high;
  for (int i = 0; i < n; ++i) {
    const int64_t right = std::max(0, shift[i] - 31), left = std::max(0, 31 - shift[i]);
    const int64_t a = clipped64((int64_t)c[i] * ((int64_t)1 << left), SATURATED), p = a * multiplier[i];
    const int64_t h = std::min((p + ((int64_t)1 << 30)) >> 31, (int64_t)0x7fffffff);
    out[i] = clipped(shifted<HALF_AWAY>(2 * h, right + 1), low, high);
  }
}

using Mover = void (*)(const int32_t*, int32_t*, int, const Move&, int);
constexpr Mover BY_RATIO[] = {by_ratio<HALF_EVEN>, by_ratio<HALF_UP>,     by_ratio<HALF_AWAY>,
                              by_ratio<HALF_DOWN>, by_ratio<TOWARD_ZERO>, by_ratio<FLOOR>};
constexpr Mover BY_MULTIPLIER[] = {by_multiplier<HALF_EVEN>, by_multiplier<HALF_UP>,     by_multiplier<HALF_AWAY>,
                                   by_multiplier<HALF_DOWN>, by_multiplier<TOWARD_ZERO>, by_multiplier<FLOOR>};

void move(const int32_t* c, int32_t* out, int n, const Move& m, int channel) {
  int32_t between[ROW];
  if (m.first) {
    move(c, between, n, *m.first, channel);
    c = between;
  }
  if (m.form == RATIO) return BY_RATIO[m.rounding](c, out, n, m, channel);
  if (m.form == MULTIPLIER) return BY_MULTIPLIER[m.rounding](c, out, n, m, channel);
  if (m.form == TWO_STAGE) return in_two_stages(c, out, n, m, channel);
  std::memcpy(out, c, n * sizeof(int32_t));
}

template <typename T>
void store_as(const int32_t* __restrict c, char* to, int64_t at, int n, int32_t zero) {
  T* __restrict out = reinterpret_cast<T*>(to) + at;
  for (int i = 0; i < n; ++i) out[i] = (T)(c[i] + zero);
}

template <typename T>
void load_as(const char* from, int64_t at, int32_t* __restrict c, int n, int32_t zero) {
  const T* __restrict in = reinterpret_cast<const T*>(from) + at;
  for (int i = 0; i < n; ++i) c[i] = (int32_t)in[i] - zero;
}

void emit(const int32_t* c, int n, int channel, const Output& o, int64_t at) {
  if (o.move.form == TO_REAL) {
    float* __restrict out = reinterpret_cast<float*>(o.data) + at;
    const float* __restrict ratio = o.move.ratio + channel;
    for (int i = 0; i < n; ++i) out[i] = (float)c[i] * ratio[i];
    return;
  }
  int32_t q[ROW];
  if (o.move.form != AS_IS) {
    move(c, q, n, o.move, channel);
    c = q;
  }
  switch (o.type) {
    case U8: return store_as<uint8_t>(c, o.data, at, n, o.zero);
    case I8: return store_as<int8_t>(c, o.data, at, n, o.zero);
    case I16: return store_as<int16_t>(c, o.data, at, n, o.zero);
    default: return store_as<int32_t>(c, o.data, at, n, o.zero);
  }
}

void clip(int32_t* c, int n, int32_t low, int32_t high) {
  for (int i = 0; i < n; ++i) c[i] = std::min(std::max(c[i], low), high);
}

void hold(const Register& r, int32_t* c, int n) {
  if (r.wrap_bits) {
    const int by = 32 - r.wrap_bits;
    for (int i = 0; i < n; ++i) c[i] = (int32_t)((uint32_t)c[i] << by) >> by;
  }
  if (r.saturates) clip(c, n, r.low, r.high);
}

}  // namespace

void load(const char* from, int32_t type, int32_t zero, int64_t at, int32_t* c, int n) {
  switch (type) {
    case U8: return load_as<uint8_t>(from, at, c, n, zero);
    case I8: return load_as<int8_t>(from, at, c, n, zero);
    case I16: return load_as<int16_t>(from, at, c, n, zero);
    default: return load_as<int32_t>(from, at, c, n, zero);
  }
}

void finish(int32_t* c, int n, int channel, int64_t row, const Tail& t, int64_t column) {
  hold(t.sums, c, n);
  if (t.adds) {
    int32_t own[ROW], there[ROW], other[ROW];
    load(t.addend.data, t.addend.type, t.addend.zero, row * t.addend.stride + column, there, n);
    move(c, own, n, t.addend.own, channel);
    move(there, other, n, t.addend.other, channel);
    const int32_t *first = t.adds == FROM ? other : own, *second = t.adds == FROM ? own : other;
    const uint32_t sign = t.adds == PLUS ? 1u : -1u;
    for (int i = 0; i < n; ++i) c[i] = (int32_t)((uint32_t)first[i] + sign * (uint32_t)second[i]);
    hold(t.added, c, n);
  }
  if (t.clamps) {
    const int32_t *__restrict low = t.clamp_low + channel, *__restrict high = t.clamp_high + channel;
    for (int i = 0; i < n; ++i) c[i] = std::min(std::max(c[i], low[i]), high[i]);
  }
  for (int k = 0; k < t.outputs; ++k) emit(c, n, channel, t.output[k], row * t.output[k].stride + column);
}
