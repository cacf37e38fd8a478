// The windows of a block of pixels as matrix tiles read them.
#pragma once
#include <numeric>

#include "conv.h"

constexpr int SIDE = 16;        // rows of a tile, and int32 of one of its rows
constexpr int STEP = 64;        // bytes of a row of a tile
constexpr int ROWS = 2 * SIDE;  // of a chunk

// Windows of a chunk whose pixels follow one another; those between runs are of no pixel.
struct Run {
  int from, rows;
  int64_t pixel;
};

// At most ROWS windows that lie at one distance from one another.
struct Chunk {
  const uint8_t* at;
  int64_t pitch;
  int rows;
  const int64_t* steps;  // from the first byte of a window to that of each step
  bool near;             // windows share most of their bytes, so these are in the cache
  std::vector<Run> runs;
};

// Bytes, with their highest bit turned where they are signed. What lies after them is written over, by less than 64
// bytes; what is read ends at `end`.
ALWAYS void copy_bytes(uint8_t* to, const uint8_t* from, int64_t n, const uint8_t* end, __m512i flip) {
  if (n <= 32 && end - from >= 32) {
    const __m256i half = _mm512_castsi512_si256(flip);
    _mm256_storeu_si256((__m256i*)to, _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)from), half));
    return;
  }
  for (; n > 0; n -= 64, to += 64, from += 64) {
    const __mmask64 some = end - from >= 64 ? ~0ull : first_bytes((int)n);
    _mm512_storeu_si512(to, _mm512_xor_si512(_mm512_maskz_loadu_epi8(some, from), flip));
  }
}

// Weaves rows of an image: a pixel of each by turns, so that what a window has of them lies in one piece.
class Weave {
 public:
  static constexpr int MOST = 16;  // rows

  // `size` bytes of a pixel; those of all rows are at most 64.
  Weave(int rows, int size) : rows(rows), size(size), pixels(STEP / (rows * size)) {
    for (int r = 0; r < rows; ++r) {
      alignas(64) uint8_t from[STEP] = {};
      for (int i = 0; i < pixels * size; ++i) {
        const int to = (i / size * rows + r) * size + i % size;
        from[to] = (uint8_t)i;
        mask[r] |= 1ull << to;
      }
      order[r] = _mm512_load_si512(from);
    }
  }

  // Rows of n pixels; reads 64 bytes past their ends, and writes as many past the end.
  void operator()(const uint8_t* const* from, int64_t n, uint8_t* to) const {
    for (int64_t x = 0; x < n; x += pixels, to += pixels * rows * size) {
      __m512i out = _mm512_setzero_si512();
      for (int r = 0; r < rows; ++r)
        out = _mm512_mask_permutexvar_epi8(out, mask[r], order[r], _mm512_loadu_si512(from[r] + x * size));
      _mm512_storeu_si512(to, out);
    }
  }

 private:
  const int rows, size, pixels;
  __m512i order[MOST];
  __mmask64 mask[MOST] = {};
};

// The windows of a block of pixels.
class Windows {
 public:
  std::vector<Chunk> chunks;

  Windows(const Job& j, int group, int64_t begin, int64_t end, Room& room)
      : j(j), c(j.c), each(c.channels / c.groups), from(group * each),
        flip(_mm512_set1_epi8(c.values == I8 ? (char)0x80 : 0)), room(room) {
    for (int64_t s = 0; s < c.steps; ++s) along.push_back(s * STEP);
    const bool whole_steps = c.groups == 1 && c.gather == AT_PIXELS && c.channels % STEP == 0;
    if (c.woven) in_rows(begin, end);
    else if (whole_steps && is_pointwise(j) && c.values == U8) in_place(begin, end);
    else if (whole_steps && overlap()) pad(begin, end);
    else gather(begin, end);
  }

 private:
  const Job& j;
  const Conv& c;
  const int64_t each, from;  // channels of the group, and the first of them
  const __m512i flip;
  Room& room;
  std::vector<int64_t> along;  // the steps of every chunk

  void copy(uint8_t* to, const uint8_t* at, int64_t n) const { copy_bytes(to, at, n, j.end, flip); }

  // The channels of a group; `zeros` are longer by 64.
  void copy_tap(uint8_t* to, const uint8_t* at) const {
    copy_bytes(to, at + from, each, at == c.zeros ? c.zeros + c.channels + 64 : j.end, flip);
  }

  // Single pixels are windows where they lie; the last ones are copied, for a chunk is read whole.
  void in_place(int64_t begin, int64_t end) {
    const int64_t all = (j.end - j.x) / c.channels;
    for (; begin < end && begin + ROWS <= all; begin += ROWS)
      add(j.x + begin * c.channels, c.channels, begin, end);
    if (begin < end) gather(begin, end);
  }

  // The windows of the pixels from `first` on, one after the other.
  void add(const uint8_t* at, int64_t pitch, int64_t first, int64_t end, bool near = false) {
    const int rows = (int)std::min<int64_t>(ROWS, end - first);
    chunks.push_back({at, pitch, rows, along.data(), near, {{0, rows, first}}});
  }

  // Windows in woven rows; where a row is woven with none, they lie where the images do.
  void in_rows(int64_t begin, int64_t end) {
    const Weave weave(c.woven, c.channels);
    const int64_t across = j.s.out_width, plane = j.s.out_height * across, pixel = c.channels * c.woven;
    const int64_t wide = j.s.width * pixel, reach = (int64_t)c.woven * c.dilation_h;  // from one step to the next
    const int64_t every = c.steps > 1 ? std::gcd((int64_t)c.stride_h, reach) : c.stride_h;
    const int64_t more = (c.steps - 1) * reach / every, images = (end - 1) / plane - begin / plane + 1;
    for (int64_t s = 0; s < c.steps; ++s) along[s] = s * reach / every * wide;
    const int64_t rows = ((end - begin) / across + 2 * images) * (c.stride_h / every) + images * (more + 1);
    uint8_t* to = room.of(rows * wide + ROWS * c.stride_w * pixel + 2 * STEP);
    while (begin < end) {
      const int64_t image = begin / plane, last = std::min(end, (image + 1) * plane) - 1;
      const int64_t top = begin % plane / across, bottom = last % plane / across;
      const uint8_t* at = to;
      for (int64_t y = 0; y <= (bottom - top) * (c.stride_h / every) + more; ++y, to += wide)
        weave_row(weave, image, top * c.stride_h + y * every, to);
      for (; begin <= last; at += c.stride_h / every * wide) {
        const int64_t until = std::min(last + 1, (begin / across + 1) * across);
        for (; begin < until; begin += ROWS)
          add(at + begin % across * c.stride_w * pixel, c.stride_w * pixel, begin, until, true);
        begin = until;
      }
    }
  }

  // The row `y` of an image with those that a step reads beside it; past the last one are no weights.
  void weave_row(const Weave& weave, int64_t image, int64_t y, uint8_t* to) const {
    const uint8_t* rows[Weave::MOST];
    for (int r = 0; r < c.woven; ++r) {
      const int64_t at = std::min(y + (int64_t)r * c.dilation_h, j.s.height - 1);
      rows[r] = j.x + (image * j.s.height + at) * j.s.width * c.channels;
    }
    weave(rows, j.s.width, to);
  }

  // Whether windows overlap and it pays to compute some more, between the rows of an image: about as much as 16
  // channels take, it costs to copy every window.
  bool overlap() const {
    const int64_t between = (c.kernel_w - 1) * c.dilation_w;
    return c.taps > 1 && c.stride_h == 1 && c.stride_w == 1 && between * c.out_channels <= SIDE * j.s.out_width;
  }

  // Copies of rows of images with their padding, one after the other: so windows, and what lies between the last of a
  // row and the first of the next, follow one another at the distance of a pixel.
  void pad(int64_t begin, int64_t end) {
    const int64_t across = j.s.out_width, plane = j.s.out_height * across;
    const int64_t wide = across + (c.kernel_w - 1) * c.dilation_w, more = (c.kernel_h - 1) * c.dilation_h;
    for (int64_t s = 0; s < c.steps; ++s) {
      const int64_t tap = s * STEP / c.channels, y = tap / c.kernel_w, x = tap % c.kernel_w;
      along[s] = (y * c.dilation_h * wide + x * c.dilation_w) * c.channels + s * STEP % c.channels;
    }
    const int64_t images = (end - 1) / plane - begin / plane + 1, rows = (end - begin) / across + images * (more + 2);
    uint8_t* to = room.of((rows * wide + ROWS + 1) * c.channels);
    while (begin < end) {
      const int64_t image = begin / plane, last = std::min(end, (image + 1) * plane) - 1;
      const int64_t top = begin % plane / across, bottom = last % plane / across;
      const uint8_t* start = to;
      for (int64_t y = top; y <= bottom + more; ++y) to = padded_row(image, y - c.pad_h, to);
      const int64_t until = (bottom - top) * wide + last % across + 1;
      for (int64_t at = begin % across; at < until; at += ROWS)
        add_between(start, wide, at, std::min(until, at + ROWS), image * plane + top * across);
      begin = last + 1;
    }
  }

  // The windows [at, until) from `start` on, `wide` of them for a row of pixels, of which `pixel` is the first.
  void add_between(const uint8_t* start, int64_t wide, int64_t at, int64_t until, int64_t pixel) {
    const int64_t across = j.s.out_width;
    chunks.push_back({start + at * c.channels, c.channels, (int)(until - at), along.data(), true, {}});
    for (int64_t from = at; from < until; from += wide - from % wide) {
      const int64_t width = std::min(across - from % wide, until - from);
      if (width <= 0) continue;
      chunks.back().runs.push_back({(int)(from - at), (int)width, pixel + from / wide * across + from % wide});
    }
  }

  // A row of an image with its padding, and where the next one goes.
  uint8_t* padded_row(int64_t image, int64_t y, uint8_t* to) const {
    const bool inside = y >= 0 && y < j.s.height;
    const int64_t row = j.s.width * c.channels, before = inside ? c.pad_w : j.s.width + c.pad_w;
    for (int64_t n = 0; n < before; ++n, to += c.channels) copy_tap(to, c.zeros);
    if (inside) {
      copy(to, j.x + (image * j.s.height + y) * row, row);
      to += row;
    }
    for (int64_t n = 0; n < c.pad_w; ++n, to += c.channels) copy_tap(to, c.zeros);
    return to;
  }

  // Copies of windows. An odd number of lines from one to the next has them lie in different sets of the cache.
  void gather(int64_t begin, int64_t end) {
    const int64_t pitch = (c.steps | 1) * STEP;
    uint8_t* to = room.of((end - begin + ROWS - 1) / ROWS * ROWS * pitch + STEP);
    for (int64_t first = begin; first < end; first += ROWS) add(to + (first - begin) * pitch, pitch, first, end);
    for (const Place& place : places_of(j, begin, end)) {
      copy_window(place, to);
      to += pitch;
    }
  }

  void copy_window(const Place& place, uint8_t* to) const {
    if (!place.inside) {
      const int64_t row = c.gather == IN_ROWS ? c.depth : c.kernel_w * each;
      for (int y = 0; y < c.kernel_h; ++y, to += row)
        for (int x = 0; x < c.kernel_w; ++x) copy_tap(to + x * each, tap(j, place, y, x));
      return;
    }
    // taps that lie in one piece, as those of a row do
    const int piece = c.gather == AT_PIXELS && c.dilation_w == 1 && c.groups == 1 ? c.kernel_w : 1;
    for (int k = 0; k < c.taps; k += piece, to += piece * c.depth)
      copy(to, place.first + j.steps[k] + from, piece * c.depth);
  }
};
