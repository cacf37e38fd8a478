// Convolutions on matrix tiles (AMX): 16 windows of 64 bytes by 64 bytes of 16 output channels at once.
//
// A product of tiles adds dot products of four unsigned by four signed bytes to int32 and does not saturate, so a sum
// is the same as in conv.cpp. A window is read in steps of 64 bytes, the last one filled up with zeros; where pixels
// have few channels, in steps of some of its rows.
#include "lanes.h"

#ifdef HAGO_TILES
#include <sys/syscall.h>
#include <unistd.h>

#include "tile_windows.h"

namespace {

// The shapes of the tiles, as the processor reads them: `rows` of sums (0 to 3) and of windows (4, 5), whole weights
// (6, 7).
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  Shapes(int some, int step) {  // one row of a matrix takes less time than sixteen
    for (int i = 0; i < 8; ++i) {
      bytes[i] = i == 4 || i == 5 ? step : STEP;
      rows[i] = i < 6 ? some : step / 4;
    }
  }
};

constexpr int AHEAD = 2;  // steps that are brought near before they are used
constexpr int FAR = 256;  // bytes of a window from which on weights do not stay near

ALWAYS void fetch(const uint8_t* from, int64_t pitch) {
#pragma GCC unroll 16
  for (int r = 0; r < SIDE; ++r) _mm_prefetch((const char*)from + r * pitch, _MM_HINT_T0);
}

// The sums of R tiles of windows for 16 * Z output channels.
template <int R, int Z>
void multiply(const Chunk& chunk, int64_t steps, int64_t step, const int8_t* weight, const int32_t* offset,
              int32_t* sums, int64_t pitch) {
  const uint8_t *low = chunk.at, *high = low + SIDE * chunk.pitch, *w = (const uint8_t*)weight;
  const int64_t next = steps * SIDE * step;  // from one block of channels to the next
  const bool far = steps * step >= FAR;
  _tile_loadd(0, offset, 0);
  if (R == 2) _tile_loadd(1, offset, 0);
  if (Z == 2) _tile_loadd(2, offset + SIDE, 0);
  if (R * Z == 4) _tile_loadd(3, offset + SIDE, 0);
  for (int64_t s = 0; s < steps; ++s, w += SIDE * step) {
    const uint8_t *a = low + chunk.steps[s], *b = high + chunk.steps[s];
    if (!chunk.near) {
      fetch(a + AHEAD * STEP, chunk.pitch);
      if (R == 2) fetch(b + AHEAD * STEP, chunk.pitch);
    }
    if (far) fetch(w + AHEAD * SIDE * STEP, STEP);
    _tile_loadd(4, a, chunk.pitch);
    _tile_loadd(6, w, STEP);
    _tile_dpbusd(0, 4, 6);
    if (R == 2) {
      _tile_loadd(5, b, chunk.pitch);
      _tile_dpbusd(1, 5, 6);
    }
    if (Z == 2) {
      if (far) fetch(w + next + AHEAD * SIDE * STEP, STEP);
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

// Bytes of a step.
int step_of(const Conv& c) { return c.woven ? c.depth : STEP; }

void one_panel(const Job& j, const Windows& windows, int group, int panel) {
  const Conv& c = j.c;
  const int here = c.out_channels / c.groups, at = group * c.panels + panel;
  const int width = std::min(c.panel, here - panel * c.panel), column = group * here + panel * c.panel;
  const int step = step_of(c);
  const int8_t* weight = c.weight + (int64_t)at * c.panel * c.steps * step;
  const int32_t* offset = c.offset + at * c.panel;
  const Output& o = j.t.output[0];
  alignas(64) int32_t room[ROWS * 4 * SIDE];
  for (const Chunk& chunk : windows.chunks) {
    // whole tiles are stored where they belong, if that is all there is to do
    const bool whole = chunk.runs.size() == 1 && chunk.runs[0].rows == chunk.rows && chunk.rows % SIDE == 0;
    const bool raw = j.end_form == RAW && whole && width == c.panel;
    int32_t* sums = raw ? (int32_t*)o.data + chunk.runs[0].pixel * o.stride + column : room;
    const int64_t pitch = raw ? o.stride : c.panel;
    const auto rows = [&](const Run& run) {
      return Tile{sums + run.from * c.panel, run.rows, c.panel, width, column, run.pixel, column};
    };
    if (j.end_form == ANY)
      for (const Run& run : chunk.runs) bring_near(j.t, rows(run));
    for (int z = 0; z < c.panel; z += 2 * SIDE) {
      const bool two = z + SIDE < c.panel;
      const auto sum = chunk.rows > SIDE ? (two ? multiply<2, 2> : multiply<2, 1>)
                                         : (two ? multiply<1, 2> : multiply<1, 1>);
      sum(chunk, c.steps, step, weight + z * c.steps * step, offset + z, sums + z, pitch);
    }
    if (raw) continue;
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
    const Shapes shapes(windows.chunks.size() > 1 ? SIDE : std::min(SIDE, windows.chunks[0].rows), step_of(j.c));
    _tile_loadconfig(&shapes);
    for (; p < first + count && p / j.c.panels == group; ++p) one_panel(j, windows, group, p % j.c.panels);
  }
  _tile_release();
}
#else
extern "C" int hago_has_tiles() { return 0; }
#endif
