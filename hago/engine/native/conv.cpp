// Convolutions of bytes by signed bytes, summed in int32 modulo 2**32, with all that follows done on the tile.
//
// The dot product of four unsigned by four signed bytes (VPDPBUSD) does not saturate, so a sum is exact modulo
// 2**32 in any order. int8 activations are read as uint8 with 128 added, which the offset takes out again.
#include "rows.h"

#ifdef __AVX512VNNI__
#include <algorithm>
#include <cstring>
#include <vector>

#include "vectors.h"

struct Conv {
  int32_t channels, out_channels, groups;
  int32_t kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int32_t is_signed;     // x holds int8
  int32_t panel;         // output channels worked on at once, a multiple of 16; 0: every channel by itself
  int32_t panels;        // of a group
  int32_t depth;         // bytes of a tap; a multiple of 4
  int32_t taps;          // AT_PIXELS: kernel_h * kernel_w; IN_ROWS: kernel_h, each a row of pixels; IN_PATCH: 1
  int32_t gather;
  const int8_t* weight;  // [group][panel][tap][depth / 4][panel channels][4], or see by_channel
  const int32_t* offset; // [group][panels * panel]: bias - zero point * sum of the weights
  const uint8_t* zeros;  // `channels` (and 64 more) zero points, as stored
};

// How the bytes of a window are read: tap by tap; a row of the window at once, where pixels have few channels;
// or copied together, where nothing lies side by side.
enum Gather : int32_t { AT_PIXELS = 0, IN_ROWS = 1, IN_PATCH = 2 };

struct Shape {
  int64_t images, height, width, out_height, out_width;
};

namespace {

struct Job {
  const Conv& c;
  const Shape& s;
  const Tail& t;
  const uint8_t* x;
  const uint8_t* end;
  const bool fast, plain;
  std::vector<int64_t> steps;  // from the first byte of a window that lies inside to that of each tap

  Job(const Conv& c, const Shape& s, const Tail& t, const uint8_t* x)
      : c(c), s(s), t(t), x(x), fast(is_quick(t)), plain(is_plain(t)) {
    end = x + s.images * s.height * s.width * c.channels;
    const int across = c.gather == AT_PIXELS ? c.kernel_w : 1;
    for (int k = 0; k < c.taps; ++k)
      steps.push_back((k / across * c.dilation_h * s.width + k % across * c.dilation_w) * c.channels);
  }
};

// The window of an output pixel.
struct Place {
  const uint8_t* image;
  const uint8_t* first;  // its first byte, where it lies inside
  int64_t out_x, out_y, x, y;
  bool inside;
};

void look(const Job& j, Place& p) {
  const Conv& c = j.c;
  p.y = p.out_y * c.stride_h - c.pad_h;
  p.x = p.out_x * c.stride_w - c.pad_w;
  p.first = p.image + (p.y * j.s.width + p.x) * c.channels;
  p.inside = p.y >= 0 && p.x >= 0 && p.y + (c.kernel_h - 1) * c.dilation_h < j.s.height &&
             p.x + (c.kernel_w - 1) * c.dilation_w < j.s.width;
  // a row is read in fours, which may pass its end by three bytes
  if (c.gather == IN_ROWS) p.inside = p.inside && j.end - (p.first + j.steps.back()) >= c.depth;
  if (c.gather == IN_PATCH) p.inside = false;
}

Place place_of(const Job& j, int64_t pixel) {
  const int64_t plane = j.s.out_height * j.s.out_width, in = pixel % plane;
  Place p{};
  p.image = j.x + pixel / plane * j.s.height * j.s.width * j.c.channels;
  p.out_y = in / j.s.out_width;
  p.out_x = in % j.s.out_width;
  look(j, p);
  return p;
}

void advance(const Job& j, Place& p) {
  if (++p.out_x == j.s.out_width) {
    p.out_x = 0;
    if (++p.out_y == j.s.out_height) {
      p.out_y = 0;
      p.image += j.s.height * j.s.width * j.c.channels;
    }
  }
  look(j, p);
}

inline const uint8_t* tap(const Job& j, const Place& p, int ky, int kx) {
  const int64_t y = p.y + ky * j.c.dilation_h, x = p.x + kx * j.c.dilation_w;
  const bool inside = (uint64_t)y < (uint64_t)j.s.height && (uint64_t)x < (uint64_t)j.s.width;
  return inside ? p.image + (y * j.s.width + x) * j.c.channels : j.c.zeros;
}

// The window with its channels from `from` on, each row of taps `depth` bytes after the one before.
void copy_window(const Job& j, const Place& p, int from, uint8_t* to) {
  const int each = j.c.channels / j.c.groups;
  for (int ky = 0; ky < j.c.kernel_h; ++ky) {
    uint8_t* row = j.c.gather == IN_ROWS ? to + ky * j.c.depth : to + ky * j.c.kernel_w * each;
    for (int kx = 0; kx < j.c.kernel_w; ++kx) std::memcpy(row + kx * each, tap(j, p, ky, kx) + from, each);
  }
}

void finish_any(const Job& j, int32_t* sums, int width, int column, int64_t row) {
  if (j.plain) finish_vectors(sums, width, column, row, j.t, column);
  else finish(sums, width, column, row, j.t, column);
}

template <int Z>
inline void end_row(const Job& j, int32_t* sums, int width, int column, int64_t row) {
  if (!j.fast) return finish_any(j, sums, width, column, row);
  const Output& o = j.t.output[0];
  const int64_t at = row * o.stride + column;
  if (Z == 4 && width == 64)
    return quick_64(_mm512_load_si512(sums), _mm512_load_si512(sums + 16), _mm512_load_si512(sums + 32),
                    _mm512_load_si512(sums + 48), o, column, at);
#pragma GCC unroll 4
  for (int z = 0; z < Z; ++z)
    quick(_mm512_load_si512(sums + 16 * z), o, column + 16 * z, at + 16 * z, first_lanes(width - 16 * z));
}

template <int R, int Z, bool SIGNED>
inline void accumulate(__m512i (&acc)[R][Z], const uint8_t* const* x, const int8_t* w, int depth) {
  const __m512i flip = _mm512_set1_epi8((char)0x80);
  for (int k = 0; k < depth; k += 4, w += 64 * Z) {
    __m512i b[Z];
#pragma GCC unroll 4
    for (int z = 0; z < Z; ++z) b[z] = _mm512_loadu_si512(w + 64 * z);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, x[r] + k, 4);
      __m512i a = _mm512_set1_epi32(four);
      if (SIGNED) a = _mm512_xor_si512(a, flip);
#pragma GCC unroll 4
      for (int z = 0; z < Z; ++z) acc[r][z] = _mm512_dpbusd_epi32(acc[r][z], a, b[z]);
    }
  }
}

// The pixels [begin, end) of one panel of output channels, R pixels by 16 * Z channels at a time.
template <int R, int Z, bool SIGNED>
void tiles(const Job& j, int group, int panel, int64_t begin, int64_t end) {
  const Conv& c = j.c;
  const int each_out = c.out_channels / c.groups, width = std::min(c.panel, each_out - panel * c.panel);
  const int column = group * each_out + panel * c.panel, from = group * (c.channels / c.groups);
  const int taps = c.taps, room = taps * c.depth + 4;
  const int8_t* weight = c.weight + (int64_t)(group * c.panels + panel) * taps * c.depth * 16 * Z;
  const int32_t* offset = c.offset + (group * c.panels + panel) * c.panel;
  const int64_t* steps = j.steps.data();
  std::vector<uint8_t> copies(c.gather == AT_PIXELS ? 0 : R * room);
  const bool pointwise = c.gather == AT_PIXELS && taps == 1 && j.s.out_height == 1 && j.s.height == 1 && !c.pad_w &&
                         c.stride_w == 1;
  alignas(64) int32_t sums[16 * Z * R];
  Place next = place_of(j, begin), place[R];
  for (int64_t first = begin; first < end; first += R) {
    const int count = (int)std::min<int64_t>(R, end - first);
    const uint8_t* at[R];
    bool all_inside = true;
    if (pointwise) {
      for (int r = 0; r < R; ++r) at[r] = j.x + (first + (r < count ? r : 0)) * c.channels + from;
    } else {
      for (int r = 0; r < R; ++r) {
        place[r] = r < count ? next : place[0];  // rows past the end are computed and dropped
        all_inside = all_inside && place[r].inside;
        if (r < count) advance(j, next);
      }
    }
    __m512i acc[R][Z];
#pragma GCC unroll 4
    for (int z = 0; z < Z; ++z) {
      const __m512i start = _mm512_loadu_si512(offset + 16 * z);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[r][z] = start;
    }
    if (pointwise) {
      accumulate<R, Z, SIGNED>(acc, at, weight, c.depth);
    } else if (all_inside) {
      const int8_t* w = weight;
      for (int k = 0; k < taps; ++k, w += c.depth * 16 * Z) {
        for (int r = 0; r < R; ++r) at[r] = place[r].first + steps[k] + from;
        accumulate<R, Z, SIGNED>(acc, at, w, c.depth);
      }
    } else {
      if (c.gather != AT_PIXELS)
        for (int r = 0; r < R; ++r)
          if (!place[r].inside) copy_window(j, place[r], from, copies.data() + r * room);
      const int8_t* w = weight;
      for (int k = 0; k < taps; ++k, w += c.depth * 16 * Z) {
        for (int r = 0; r < R; ++r) {
          if (place[r].inside) at[r] = place[r].first + j.steps[k] + from;
          else if (c.gather == AT_PIXELS) at[r] = tap(j, place[r], k / c.kernel_w, k % c.kernel_w) + from;
          else at[r] = copies.data() + r * room + k * c.depth;
        }
        accumulate<R, Z, SIGNED>(acc, at, w, c.depth);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int z = 0; z < Z; ++z) _mm512_store_si512(sums + 16 * (r * Z + z), acc[r][z]);
    for (int r = 0; r < count; ++r) end_row<Z>(j, sums + 16 * Z * r, width, column, first + r);
  }
}

// Every channel by itself (depthwise), 64 channels at a time. The bytes of four taps are interleaved, so that
// one dot product adds four taps of 16 channels.
// weight: [block of 64 channels][four taps][4][16 channels, in the order the interleaving leaves][4]
template <bool SIGNED>
void by_channel(const Job& j, int64_t begin, int64_t end) {
  const Conv& c = j.c;
  const int taps = c.taps, fours = (taps + 3) / 4;
  const __m512i flip = _mm512_set1_epi8((char)0x80);
  std::vector<const uint8_t*> at(4 * fours, c.zeros);
  alignas(64) int32_t sums[64];
  Place place = place_of(j, begin);
  for (int64_t pixel = begin; pixel < end; ++pixel, advance(j, place)) {
    for (int k = 0; k < taps; ++k)
      at[k] = place.inside ? place.first + j.steps[k] : tap(j, place, k / c.kernel_w, k % c.kernel_w);
    for (int block = 0; block < c.channels; block += 64) {
      const int width = std::min(64, c.channels - block);
      const __mmask64 bytes = first_bytes(width);
      const int8_t* w = c.weight + (int64_t)block / 64 * fours * 256;
      __m512i acc[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
      for (int k = 0; k < 4 * fours; k += 4, w += 256) {
        __m512i t[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          t[i] = _mm512_maskz_loadu_epi8(bytes, at[k + i] + block);
          if (SIGNED) t[i] = _mm512_xor_si512(t[i], flip);
        }
        const __m512i a = _mm512_unpacklo_epi8(t[0], t[1]), b = _mm512_unpackhi_epi8(t[0], t[1]);
        const __m512i d = _mm512_unpacklo_epi8(t[2], t[3]), e = _mm512_unpackhi_epi8(t[2], t[3]);
        acc[0] = _mm512_dpbusd_epi32(acc[0], _mm512_unpacklo_epi16(a, d), _mm512_loadu_si512(w));
        acc[1] = _mm512_dpbusd_epi32(acc[1], _mm512_unpackhi_epi16(a, d), _mm512_loadu_si512(w + 64));
        acc[2] = _mm512_dpbusd_epi32(acc[2], _mm512_unpacklo_epi16(b, e), _mm512_loadu_si512(w + 128));
        acc[3] = _mm512_dpbusd_epi32(acc[3], _mm512_unpackhi_epi16(b, e), _mm512_loadu_si512(w + 192));
      }
      // acc[i] has channels 16 l + 4 i ... + 3 in its l-th quarter: a transposition puts them in order
      const __m512i p = _mm512_shuffle_i32x4(acc[0], acc[1], 0x44), q = _mm512_shuffle_i32x4(acc[2], acc[3], 0x44);
      const __m512i u = _mm512_shuffle_i32x4(acc[0], acc[1], 0xee), v = _mm512_shuffle_i32x4(acc[2], acc[3], 0xee);
      const __m512i in_order[4] = {_mm512_shuffle_i32x4(p, q, 0x88), _mm512_shuffle_i32x4(p, q, 0xdd),
                                   _mm512_shuffle_i32x4(u, v, 0x88), _mm512_shuffle_i32x4(u, v, 0xdd)};
      const Output& o = j.t.output[0];
      __m512i sum[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        sum[i] = _mm512_add_epi32(in_order[i], _mm512_loadu_si512(c.offset + block + 16 * i));
      if (j.fast && width == 64) {
        quick_64(sum[0], sum[1], sum[2], sum[3], o, block, pixel * o.stride + block);
        continue;
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __mmask16 lanes = first_lanes(width - 16 * i);
        if (j.fast && lanes) quick(sum[i], o, block + 16 * i, pixel * o.stride + block + 16 * i, lanes);
        if (!j.fast) _mm512_store_si512(sums + 16 * i, sum[i]);
      }
      if (!j.fast) finish_any(j, sums, width, block, pixel);
    }
  }
}

void panel_of(const Job& j, int group, int panel, int64_t begin, int64_t end) {
  const bool few = end - begin <= 2;  // a row or two of a matrix: no tile of pixels
  switch (j.c.panel / 16 + (j.c.is_signed ? 4 : 0) + (few ? 8 : 0)) {
    case 1: return tiles<14, 1, false>(j, group, panel, begin, end);
    case 2: return tiles<12, 2, false>(j, group, panel, begin, end);
    case 3: return tiles<8, 3, false>(j, group, panel, begin, end);
    case 4: return tiles<6, 4, false>(j, group, panel, begin, end);
    case 5: return tiles<14, 1, true>(j, group, panel, begin, end);
    case 6: return tiles<12, 2, true>(j, group, panel, begin, end);
    case 7: return tiles<8, 3, true>(j, group, panel, begin, end);
    case 8: return tiles<6, 4, true>(j, group, panel, begin, end);
    case 9: return tiles<1, 1, false>(j, group, panel, begin, end);
    case 10: return tiles<1, 2, false>(j, group, panel, begin, end);
    case 11: return tiles<1, 3, false>(j, group, panel, begin, end);
    case 12: return tiles<1, 4, false>(j, group, panel, begin, end);
    case 13: return tiles<1, 1, true>(j, group, panel, begin, end);
    case 14: return tiles<1, 2, true>(j, group, panel, begin, end);
    case 15: return tiles<1, 3, true>(j, group, panel, begin, end);
    default: return tiles<1, 4, true>(j, group, panel, begin, end);
  }
}

}  // namespace

extern "C" int hago_has_conv() { return 1; }

extern "C" void hago_conv(const Conv* conv, const Shape* shape, const Tail* tail, const uint8_t* x, int threads) {
  const Job j(*conv, *shape, *tail, x);
  const int64_t pixels = shape->images * shape->out_height * shape->out_width;
  // blocks whose windows stay in the cache while all panels pass over them; few pixels are shared out by panels
  const int64_t block = std::max<int64_t>(1, std::min<int64_t>(168, (pixels + threads - 1) / threads));
  const int64_t blocks = (pixels + block - 1) / block;
  const int all = conv->panel ? conv->groups * conv->panels : 1;
  const int share = blocks >= 2 * threads || threads == 1 ? all : 1, shares = all / share;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (int64_t unit = 0; unit < blocks * shares; ++unit) {
    const int64_t begin = unit / shares * block, end = std::min(pixels, begin + block);
    if (!conv->panel) {
      if (conv->is_signed) by_channel<true>(j, begin, end);
      else by_channel<false>(j, begin, end);
      continue;
    }
    const int first = (int)(unit % shares) * share;
    for (int p = first; p < first + share; ++p) panel_of(j, p / conv->panels, p % conv->panels, begin, end);
  }
}
#else
extern "C" int hago_has_conv() { return 0; }
extern "C" void hago_conv(const void*, const void*, const void*, const uint8_t*, int) {}
#endif
