// Convolutions on matrix tiles (AMX): 16 windows of 64 bytes by 64 bytes of 16 output channels at once.
//
// A product of tiles adds dot products of four unsigned by four signed bytes to int32 and does not saturate, so a sum
// is the same as in conv.cpp. A window is read in steps of 64 bytes, the last one filled up with zeros.
#include <cstdint>

#ifdef __AMX_INT8__
#include <sys/syscall.h>
#include <unistd.h>

#include "conv.h"

namespace {

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

// The windows of a block of pixels.
class Windows {
 public:
  std::vector<Chunk> chunks;

  Windows(const Job& j, int group, int64_t begin, int64_t end, Room& room)
      : j(j), c(j.c), each(c.channels / c.groups), from(group * each),
        flip(_mm512_set1_epi8(c.values == I8 ? (char)0x80 : 0)), room(room) {
    for (int64_t s = 0; s < c.steps; ++s) along.push_back(s * STEP);
    const bool whole_steps = c.groups == 1 && c.gather == AT_PIXELS && c.channels % STEP == 0;
    if (whole_steps && is_pointwise(j) && c.values == U8) in_place(begin, end);
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
    for (; begin < end && begin + ROWS <= all; begin += ROWS) add(j.x + begin * c.channels, c.channels, begin, end);
    if (begin < end) gather(begin, end);
  }

  // The windows of the pixels from `first` on, one after the other.
  void add(const uint8_t* at, int64_t pitch, int64_t first, int64_t end) {
    const int rows = (int)std::min<int64_t>(ROWS, end - first);
    chunks.push_back({at, pitch, rows, along.data(), {{0, rows, first}}});
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
    chunks.push_back({start + at * c.channels, c.channels, (int)(until - at), along.data(), {}});
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

// The shapes of the tiles, as the processor reads them: `rows` of sums (0 to 3) and of windows (4, 5), whole weights
// (6, 7).
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  explicit Shapes(int some) {  // one row of a matrix takes less time than sixteen
    for (int i = 0; i < 8; ++i) {
      bytes[i] = STEP;
      rows[i] = i < 6 ? some : SIDE;
    }
  }
};

constexpr int AHEAD = 2;  // steps that are brought near before they are used

ALWAYS void fetch(const uint8_t* from, int64_t pitch) {
#pragma GCC unroll 16
  for (int r = 0; r < SIDE; ++r) _mm_prefetch((const char*)from + r * pitch, _MM_HINT_T0);
}

// The sums of R tiles of windows for 16 * Z output channels.
template <int R, int Z>
void multiply(const Chunk& chunk, int64_t steps, const int8_t* weight, const int32_t* offset, int32_t* sums,
              int64_t pitch) {
  const uint8_t *low = chunk.at, *high = low + SIDE * chunk.pitch, *w = (const uint8_t*)weight;
  const int64_t next = steps * SIDE * STEP;  // from one block of channels to the next
  _tile_loadd(0, offset, 0);
  if (R == 2) _tile_loadd(1, offset, 0);
  if (Z == 2) _tile_loadd(2, offset + SIDE, 0);
  if (R * Z == 4) _tile_loadd(3, offset + SIDE, 0);
  for (int64_t s = 0; s < steps; ++s, w += SIDE * STEP) {
    const uint8_t *a = low + chunk.steps[s], *b = high + chunk.steps[s];
    fetch(a + AHEAD * STEP, chunk.pitch);
    if (R == 2) fetch(b + AHEAD * STEP, chunk.pitch);
    fetch(w + AHEAD * SIDE * STEP, STEP);
    _tile_loadd(4, a, chunk.pitch);
    _tile_loadd(6, w, STEP);
    _tile_dpbusd(0, 4, 6);
    if (R == 2) {
      _tile_loadd(5, b, chunk.pitch);
      _tile_dpbusd(1, 5, 6);
    }
    if (Z == 2) {
      fetch(w + next + AHEAD * SIDE * STEP, STEP);
      _tile_loadd(7, w + next, STEP);
      _tile_dpbusd(2, 4, 7);
      if (R == 2) _tile_dpbusd(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 4 * pitch);
  if (R == 2) _tile_stored(1, sums + SIDE * pitch, 4 * pitch);
  if (Z == 2) _tile_stored(2, sums + SIDE, 4 * pitch);
  if (R * Z == 4) _tile_stored(3, sums + SIDE * pitch + SIDE, 4 * pitch);
}

void one_panel(const Job& j, const Windows& windows, int group, int panel) {
  const Conv& c = j.c;
  const int here = c.out_channels / c.groups, at = group * c.panels + panel;
  const int width = std::min(c.panel, here - panel * c.panel), column = group * here + panel * c.panel;
  const int8_t* weight = c.weight + (int64_t)at * c.panel * c.steps * STEP;
  const int32_t* offset = c.offset + at * c.panel;
  alignas(64) int32_t sums[ROWS * 4 * SIDE];
  for (const Chunk& chunk : windows.chunks) {
    const auto rows = [&](const Run& run) {
      return Tile{sums + run.from * c.panel, run.rows, c.panel, width, column, run.pixel, column};
    };
    if (j.end_form == ANY)
      for (const Run& run : chunk.runs) bring_near(j.t, rows(run));
    for (int z = 0; z < c.panel; z += 2 * SIDE) {
      const bool two = z + SIDE < c.panel;
      const auto sum = chunk.rows > SIDE ? (two ? multiply<2, 2> : multiply<2, 1>)
                                         : (two ? multiply<1, 2> : multiply<1, 1>);
      sum(chunk, c.steps, weight + (int64_t)z * c.steps * STEP, offset + z, sums + z, c.panel);
    }
    for (const Run& run : chunk.runs) end_rows(j, rows(run));
  }
}

// Whether the system lets this process have tiles.
bool allowed() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

}  // namespace

extern "C" int hago_has_tiles() {
  static const bool has = allowed();
  return has;
}

void by_tiles(const Job& j, int first, int count, int64_t begin, int64_t end, Room& room) {
  for (int p = first; p < first + count;) {
    const int group = p / j.c.panels;
    const Windows windows(j, group, begin, end, room);
    const Shapes shapes(windows.chunks.size() > 1 ? SIDE : std::min(SIDE, windows.chunks[0].rows));
    _tile_loadconfig(&shapes);
    for (; p < first + count && p / j.c.panels == group; ++p) one_panel(j, windows, group, p % j.c.panels);
  }
  _tile_release();
}
#else
extern "C" int hago_has_tiles() { return 0; }
#endif
