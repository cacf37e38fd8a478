// What `finish` does, 16 sums at a time, for tails whose moves are all plain (see rows.h).
#pragma once
#include <immintrin.h>

#include "rows.h"

inline __mmask64 first_bytes(int n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }
inline __mmask16 first_lanes(int n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

inline bool is_plain(const Move& m) {
  return (m.form == AS_IS || (m.form == RATIO && m.plain)) && (!m.first || (m.first->form == RATIO && m.first->plain));
}

// Whether `finish_tile` can stand for `finish`.
inline bool is_plain(const Tail& t) {
  bool plain = t.sums.is_idle() && t.added.is_idle();
  if (t.adds) plain = plain && is_plain(t.addend.own) && is_plain(t.addend.other);
  for (int k = 0; k < t.outputs; ++k)
    plain = plain && (t.output[k].move.form == TO_REAL || is_plain(t.output[k].move));
  return plain;
}

// What there is to do with sums: `quanta` and a store of bytes; a store as they are; or `finish`.
enum EndForm { QUICK, RAW, ANY };

inline EndForm end_form_of(const Tail& t) {
  const Output& o = t.output[0];
  if (!is_plain(t) || t.adds || t.clamps || t.outputs != 1) return ANY;
  if (o.move.form == RATIO && o.type <= I8) return QUICK;
  return o.move.form == AS_IS && o.type == I32 && o.zero == 0 && !o.move.first ? RAW : ANY;
}

// ---------------------------------------------------------------- 16 values from and to memory
// All 16, or the first ones: masked stores are slow on some machines, and so are conversions in one instruction
// with a store.
struct All {};

inline __m512i load_16(const uint8_t* at, All) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)); }
inline __m512i load_16(const int8_t* at, All) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)); }
inline __m512i load_16(const int16_t* at, All) {
  return _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)at));
}
inline __m512i load_16(const int32_t* at, All) { return _mm512_loadu_si512(at); }
inline __m512i load_16(const uint8_t* at, __mmask16 m) { return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(m, at)); }
inline __m512i load_16(const int8_t* at, __mmask16 m) { return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(m, at)); }
inline __m512i load_16(const int16_t* at, __mmask16 m) {
  return _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(m, at));
}
inline __m512i load_16(const int32_t* at, __mmask16 m) { return _mm512_maskz_loadu_epi32(m, at); }

inline void store_16(uint8_t* at, __m512i q, All) { _mm_storeu_si128((__m128i*)at, _mm512_cvtepi32_epi8(q)); }
inline void store_16(int16_t* at, __m512i q, All) { _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16(q)); }
inline void store_16(int32_t* at, __m512i q, All) { _mm512_storeu_si512(at, q); }
inline void store_16(float* at, __m512 v, All) { _mm512_storeu_ps(at, v); }
inline void store_16(uint8_t* at, __m512i q, __mmask16 m) { _mm_mask_storeu_epi8(at, m, _mm512_cvtepi32_epi8(q)); }
inline void store_16(int16_t* at, __m512i q, __mmask16 m) {
  _mm256_mask_storeu_epi16(at, m, _mm512_cvtepi32_epi16(q));
}
inline void store_16(int32_t* at, __m512i q, __mmask16 m) { _mm512_mask_storeu_epi32(at, m, q); }
inline void store_16(float* at, __m512 v, __mmask16 m) { _mm512_mask_storeu_ps(at, m, v); }

// ---------------------------------------------------------------- moves
inline __m512i scaled(__m512i c, __m512 ratio, __m512 least, __m512 most) {
  const __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(c), ratio);
  return _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(v, least), most));
}

// A ratio in registers.
struct Ratio {
  const float* ratios;
  __m512 least, most;

  explicit Ratio(const Move& m) : ratios(m.ratio), least(_mm512_set1_ps(m.least)), most(_mm512_set1_ps(m.most)) {}

  __m512i operator()(__m512i c, int channel) const {
    return scaled(c, _mm512_loadu_ps(ratios + channel), least, most);
  }
};

// A plain Move in registers.
struct Plain {
  const Ratio first, last;
  const bool as_is, twice;

  explicit Plain(const Move& m) : first(m.first ? *m.first : m), last(m), as_is(m.form == AS_IS), twice(m.first) {}

  __m512i operator()(__m512i c, int channel) const {
    if (as_is) return c;
    if (twice) c = first(c, channel);
    return last(c, channel);
  }
};

// ---------------------------------------------------------------- tiles
// Rows of sums, `pitch` from one to the next; the first is row `row` of what is stored, from `column` on, and the
// others follow it there or lie where `order` says.
struct Tile {
  int32_t* sums;
  int rows, pitch, width, channel;
  int64_t row, column;
  const int64_t* order = nullptr;

  int64_t at(int r) const { return order ? order[r] : row + r; }
};

// Calls `each(sums, row, column, lanes)` in the order of memory.
template <typename Each>
inline void by_rows(const Tile& t, Each each) {
  for (int r = 0; r < t.rows; ++r) {
    int32_t* sums = t.sums + r * t.pitch;
    const int64_t row = t.at(r);
    int i = 0;
    for (; i + 16 <= t.width; i += 16) each(sums + i, row, i, All{});
    if (i < t.width) each(sums + i, row, i, first_lanes(t.width - i));
  }
}

template <typename T, typename Sum>
void add_tile(const Tile& t, const Addend& a, Sum sum) {
  const Plain own(a.own), other(a.other);
  const __m512i zero = _mm512_set1_epi32(a.zero);
  const int64_t stride = a.stride;
  const T* data = reinterpret_cast<const T*>(a.data) + t.column;
  by_rows(t, [&](int32_t* sums, int64_t row, int i, auto lanes) {
    const __m512i there = _mm512_sub_epi32(load_16(data + row * stride + i, lanes), zero);
    const __m512i c = own(_mm512_loadu_si512(sums), t.channel + i);
    _mm512_storeu_si512(sums, sum(c, other(there, t.channel + i)));
  });
}

template <typename Sum>
void add_tile_of(const Tile& t, const Addend& a, Sum sum) {
  switch (a.type) {
    case U8: return add_tile<uint8_t>(t, a, sum);
    case I8: return add_tile<int8_t>(t, a, sum);
    case I16: return add_tile<int16_t>(t, a, sum);
    default: return add_tile<int32_t>(t, a, sum);
  }
}

inline void clamp_tile(const Tile& t, const int32_t* low, const int32_t* high) {
  by_rows(t, [&](int32_t* sums, int64_t, int i, auto) {
    const __m512i c = _mm512_max_epi32(_mm512_loadu_si512(sums), _mm512_loadu_si512(low + t.channel + i));
    _mm512_storeu_si512(sums, _mm512_min_epi32(c, _mm512_loadu_si512(high + t.channel + i)));
  });
}

inline void real_tile(const Tile& t, const Output& o) {
  float* data = reinterpret_cast<float*>(o.data) + t.column;
  const float* ratio = o.move.ratio + t.channel;
  const int64_t stride = o.stride;
  by_rows(t, [&](const int32_t* sums, int64_t row, int i, auto lanes) {
    const __m512 c = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums));
    store_16(data + row * stride + i, _mm512_mul_ps(c, _mm512_loadu_ps(ratio + i)), lanes);
  });
}

template <typename T>
void store_tile(const Tile& t, const Output& o) {
  const Plain move(o.move);
  const __m512i zero = _mm512_set1_epi32(o.zero);
  const int64_t stride = o.stride;
  T* data = reinterpret_cast<T*>(o.data) + t.column;
  by_rows(t, [&](const int32_t* sums, int64_t row, int i, auto lanes) {
    const __m512i q = move(_mm512_loadu_si512(sums), t.channel + i);
    store_16(data + row * stride + i, _mm512_add_epi32(q, zero), lanes);
  });
}

// Bytes keep their low 8 bits, so that int8 and uint8 are stored alike.
inline void finish_tile(const Tile& tile, const Tail& t) {
  const auto plus = [](__m512i own, __m512i other) { return _mm512_add_epi32(own, other); };
  const auto minus = [](__m512i own, __m512i other) { return _mm512_sub_epi32(own, other); };
  const auto from = [](__m512i own, __m512i other) { return _mm512_sub_epi32(other, own); };
  if (t.adds == PLUS) add_tile_of(tile, t.addend, plus);
  if (t.adds == MINUS) add_tile_of(tile, t.addend, minus);
  if (t.adds == FROM) add_tile_of(tile, t.addend, from);
  if (t.clamps) clamp_tile(tile, t.clamp_low, t.clamp_high);
  for (int k = 0; k < t.outputs; ++k) {
    const Output& o = t.output[k];
    if (o.move.form == TO_REAL) real_tile(tile, o);
    else if (o.type <= I8) store_tile<uint8_t>(tile, o);
    else if (o.type == I16) store_tile<int16_t>(tile, o);
    else store_tile<int32_t>(tile, o);
  }
}

// ---------------------------------------------------------------- bytes straight from registers
inline void store_bytes(char* to, __m512i q, __mmask16 lanes) {
  if (lanes == 0xffff) store_16(reinterpret_cast<uint8_t*>(to), q, All{});
  else store_16(reinterpret_cast<uint8_t*>(to), q, lanes);
}

// 64 integers to bytes, of which each keeps its low one.
inline void store_64(char* to, __m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i low = _mm512_set1_epi32(0xff);
  const __m512i ab = _mm512_packus_epi32(_mm512_and_si512(a, low), _mm512_and_si512(b, low));
  const __m512i cd = _mm512_packus_epi32(_mm512_and_si512(c, low), _mm512_and_si512(d, low));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(ab, cd)));
}

// Rows of `width` sums, more than 16 * (V - 1) and at most 16 * V, to bytes, with what does not change kept in
// registers.
template <int V>
struct Quick {
  struct Step {
    __m512 ratio[V], least, most;

    Step(const Move& m, int channel) : least(_mm512_set1_ps(m.least)), most(_mm512_set1_ps(m.most)) {
      for (int v = 0; v < V; ++v) ratio[v] = _mm512_loadu_ps(m.ratio + channel + 16 * v);
    }
    __m512i operator()(__m512i c, int v) const { return scaled(c, ratio[v], least, most); }
  };
  const bool twice;
  const Step first, last;
  const __m512i zero;
  const int width;

  Quick(const Output& o, int channel, int width)
      : twice(o.move.first), first(twice ? *o.move.first : o.move, channel), last(o.move, channel),
        zero(_mm512_set1_epi32(o.zero)), width(width) {}

  void operator()(const int32_t* sums, char* to) const {
    __m512i q[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      q[v] = _mm512_loadu_si512(sums + 16 * v);
      if (twice) q[v] = first(q[v], v);
      q[v] = _mm512_add_epi32(last(q[v], v), zero);
    }
    if constexpr (V == 4)
      if (width == 64) return store_64(to, q[0], q[1], q[2], q[3]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store_bytes(to + 16 * v, q[v], first_lanes(width - 16 * v));
  }
};
