// What `finish` does, 16 sums at a time in registers, for tails whose moves are all plain (see rows.h).
#pragma once
#include <immintrin.h>

#include "rows.h"

inline __mmask64 first_bytes(int n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }
inline __mmask16 first_lanes(int n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

inline bool is_plain(const Move& m) { return m.form == AS_IS || (m.form == RATIO && m.plain); }

// Whether `finish_vectors` can stand for `finish`.
inline bool is_plain(const Tail& t) {
  bool plain = !t.wrap_bits && !t.saturates;
  if (t.adds) plain = plain && is_plain(t.addend.own) && is_plain(t.addend.other);
  for (int k = 0; k < t.outputs; ++k)
    plain = plain && (t.output[k].move.form == TO_REAL || is_plain(t.output[k].move));
  return plain;
}

// Whether all there is to do is `quanta` and a store of bytes.
inline bool is_quick(const Tail& t) {
  const Output& o = t.output[0];
  return is_plain(t) && !t.adds && !t.clamps && t.outputs == 1 && o.move.form == RATIO && o.type <= I8;
}

inline __m512i moved(__m512i c, const Move& m, int channel) {
  if (m.form == AS_IS) return c;
  __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(c), _mm512_loadu_ps(m.ratio + channel));
  v = _mm512_max_ps(v, _mm512_set1_ps(m.least));
  v = _mm512_min_ps(v, _mm512_set1_ps(m.most));
  return _mm512_cvtps_epi32(v);
}

inline __m512i load_16(const char* from, int32_t type, int32_t zero, int64_t at, __mmask16 lanes) {
  __m512i c;
  switch (type) {
    case U8: c = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, from + at)); break;
    case I8: c = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, from + at)); break;
    case I16: c = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(lanes, from + 2 * at)); break;
    default: c = _mm512_maskz_loadu_epi32(lanes, from + 4 * at);
  }
  return _mm512_sub_epi32(c, _mm512_set1_epi32(zero));
}

// Conversions with a masked store in one instruction are slow on some machines, so they are two.
inline void store_16(__m512i q, char* to, int32_t type, int64_t at, __mmask16 lanes) {
  switch (type) {
    case U8:
    case I8: return _mm_mask_storeu_epi8(to + at, lanes, _mm512_cvtepi32_epi8(q));
    case I16: return _mm256_mask_storeu_epi16(to + 2 * at, lanes, _mm512_cvtepi32_epi16(q));
    default: return _mm512_mask_storeu_epi32(to + 4 * at, lanes, q);
  }
}

inline void finish_vectors(const int32_t* sums, int n, int channel, int64_t row, const Tail& t, int64_t column) {
  for (int i = 0; i < n; i += 16) {
    const __mmask16 lanes = first_lanes(n - i);
    const int at = channel + i;
    __m512i c = _mm512_loadu_si512(sums + i);
    if (t.adds) {
      const Addend& a = t.addend;
      const __m512i other = load_16(a.data, a.type, a.zero, row * a.stride + column + i, lanes);
      c = _mm512_add_epi32(moved(c, a.own, at), moved(other, a.other, at));
    }
    if (t.clamps) {
      c = _mm512_max_epi32(c, _mm512_loadu_si512(t.clamp_low + at));
      c = _mm512_min_epi32(c, _mm512_loadu_si512(t.clamp_high + at));
    }
    for (int k = 0; k < t.outputs; ++k) {
      const Output& o = t.output[k];
      const int64_t to = row * o.stride + column + i;
      if (o.move.form == TO_REAL) {
        const __m512 real = _mm512_mul_ps(_mm512_cvtepi32_ps(c), _mm512_loadu_ps(o.move.ratio + at));
        _mm512_mask_storeu_ps(o.data + 4 * to, lanes, real);
      } else {
        store_16(_mm512_add_epi32(moved(c, o.move, at), _mm512_set1_epi32(o.zero)), o.data, o.type, to, lanes);
      }
    }
  }
}

// 16 sums to bytes, as integers.
inline __m512i quanta(__m512i c, const Output& o, int channel) {
  return _mm512_add_epi32(moved(c, o.move, channel), _mm512_set1_epi32(o.zero));
}

inline void quick(__m512i c, const Output& o, int channel, int64_t at, __mmask16 lanes) {
  const __m128i stored = _mm512_cvtepi32_epi8(quanta(c, o, channel));
  if (lanes == 0xffff) _mm_storeu_si128(reinterpret_cast<__m128i*>(o.data + at), stored);
  else _mm_mask_storeu_epi8(o.data + at, lanes, stored);
}

// 64 sums at once. Bytes keep their low 8 bits, so that int8 and uint8 are stored alike.
inline void quick_64(__m512i a, __m512i b, __m512i c, __m512i d, const Output& o, int channel, int64_t at) {
  const __m512i low = _mm512_set1_epi32(0xff);
  const __m512i ab = _mm512_packus_epi32(_mm512_and_si512(quanta(a, o, channel), low),
                                         _mm512_and_si512(quanta(b, o, channel + 16), low));
  const __m512i cd = _mm512_packus_epi32(_mm512_and_si512(quanta(c, o, channel + 32), low),
                                         _mm512_and_si512(quanta(d, o, channel + 48), low));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(o.data + at, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(ab, cd)));
}
