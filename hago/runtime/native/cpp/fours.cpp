// Convolutions of bytes whose weights are split into fours, of which the sums of pairs of products fit 16 bits whatever
// the input (`fours_that_fit` of weights.py): VPMADDUBSW, which saturates such sums, is exact.
#include "accumulate.h"
#include "conv.h"

#ifdef HAGO_PAIRS
namespace {

constexpr int HALF = LANES / 2;  // channels of a four: a vector of sums
constexpr int MOST = 12;         // rows of a tile; four registers are left for weights, products and ones

// The fours of a half of a panel: those in pairs, whose products are added in 16 bits, and the others.
struct Fours {
  const int8_t* weight;
  const int32_t *pairs, *singles, *end;  // their places in a window
};

// The sums of R windows, `step` bytes from one to the next, begun with `offset`, in rows of LANES of which they fill a
// half. Three windows are addressed by one register; where each takes its own, as compilers would have it, there are
// too few.
template <int R>
__attribute__((noinline)) void add_fours(const Fours& f, const uint8_t* x, int64_t step, const int32_t* offset,
                                         int32_t* sums) {
  constexpr int THREES = (R + 2) / 3;
  const uint8_t* base[THREES];
  Vec acc[R];
#pragma GCC unroll 4
  for (int i = 0; i < THREES; ++i) base[i] = x + 3 * i * step;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = load_vec(offset);
  const int8_t* w = f.weight;
  const auto add = [&](auto count, const int32_t* place) __attribute__((always_inline)) {
    constexpr int N = decltype(count)::value;
    Vec b[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) b[n] = load_vec(w + 4 * HALF * n);
    __builtin_prefetch(w + AHEAD);
#pragma GCC unroll 4
    for (int i = 0; i < THREES; ++i) {
      const uint8_t* three[N];
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        three[n] = base[i] + place[n];
        asm("" : "+r"(three[n]));  // keeps compilers from adding `step` to registers of their own
      }
#pragma GCC unroll 4
      for (int r = 0; r < 3; ++r) {
        if (3 * i + r >= R) continue;
        Vec a[N];
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) a[n] = all_packed(three[n] + r * step).low;
        acc[3 * i + r] = dot_pairs<N>(acc[3 * i + r], a, b);
      }
    }
    w += 4 * HALF * N;
  };
  for (const int32_t* place = f.pairs; place < f.singles; place += 2) add(std::integral_constant<int, 2>{}, place);
  for (const int32_t* place = f.singles; place < f.end; ++place) add(std::integral_constant<int, 1>{}, place);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) store_vec(sums + r * LANES, acc[r]);
}

using AddFours = void (*)(const Fours&, const uint8_t*, int64_t, const int32_t*, int32_t*);
constexpr AddFours ADD_FOURS[MOST + 1] = {
    nullptr,      add_fours<1>, add_fours<2>, add_fours<3>,  add_fours<4>,  add_fours<5>,  add_fours<6>,
    add_fours<7>, add_fours<8>, add_fours<9>, add_fours<10>, add_fours<11>, add_fours<12>,
};

// At most MOST windows, `step` bytes from one to the next: where they are stored, or copied.
struct WindowTile {
  const uint8_t* first;
  int64_t step, pixel;
  int rows;
  const int64_t* order;  // the pixels of copied windows; null for those that follow one another from `pixel` on
};

// The windows of a group of the pixels [begin, end). Those that lie across an edge of an image, or cannot be read where
// they are stored, are copied.
class Windows {
 public:
  std::vector<WindowTile> tiles;

  Windows(const Job& j, int group, int64_t begin, int64_t end) : j(j), from(group * (j.c.channels / j.c.groups)) {
    if (is_pointwise(j)) add(j.x + begin * j.c.channels + from, j.c.channels, begin, end - begin);
    else add_places(begin, end);
  }

  bool has_stored() const { return !tiles.empty() && !tiles[0].order; }
  bool has_copied() const { return !copies.empty(); }

 private:
  const Job& j;
  const int from;
  std::vector<uint8_t> copies;
  std::vector<int64_t> outside;

  // `count` windows in tiles as equal as they can be.
  void add(const uint8_t* first, int64_t step, int64_t pixel, int64_t count, const int64_t* order = nullptr) {
    for (int64_t left = (count + MOST - 1) / MOST; left > 0; --left) {
      const int rows = (int)((count + left - 1) / left);
      tiles.push_back({first, step, pixel, rows, order});
      first += rows * step;
      pixel += rows;
      count -= rows;
      if (order) order += rows;
    }
  }

  // The stored windows, then the copied ones.
  void add_places(int64_t begin, int64_t end) {
    const std::vector<Place> places = places_of(j, begin, end);
    const int64_t across = j.c.stride_w * j.c.channels, window = (int64_t)j.c.taps * j.c.depth;
    const bool reachable = j.steps.back() <= INT32_MAX - j.c.depth;  // by a place of 32 bits
    const auto is_stored = [&](int64_t pixel) { return reachable && places[pixel - begin].inside; };
    for (int64_t pixel = begin, until; pixel < end; pixel = until) {
      until = pixel + 1;
      if (!is_stored(pixel)) {
        outside.push_back(pixel);
        continue;
      }
      const uint8_t* first = places[pixel - begin].first;
      const auto follows = [&](int64_t p) { return places[p - begin].first == first + (p - pixel) * across; };
      while (until < end && is_stored(until) && follows(until)) ++until;
      add(first + from, across, pixel, until - pixel);
    }
    if (outside.empty()) return;
    copies.resize(outside.size() * window + 4);
    uint8_t* to = copies.data();
    add(to, window, 0, outside.size(), outside.data());
    for (const int64_t pixel : outside) {
      copy_window(j, places[pixel - begin], from, to);
      to += window;
    }
  }
};

// One panel of output channels, in two halves.
class Panel {
 public:
  Panel(const Job& j, int group, int panel)
      : j(j), c(j.c), width(std::min(c.panel, c.out_channels / c.groups - panel * c.panel)),
        column(group * (c.out_channels / c.groups) + panel * c.panel), number(group * c.panels + panel),
        offset(c.offset + number * c.panel), starts(c.four_starts + (int64_t)2 * number * (c.panel / HALF)) {}

  void operator()(const Windows& windows) const {
    std::vector<int32_t> of_stored, of_copied;
    if (c.taps > 1) {
      std::vector<int64_t> apart;
      for (int k = 0; k < c.taps; ++k) apart.push_back((int64_t)k * c.depth);
      if (windows.has_stored()) of_stored = places(j.steps);
      if (windows.has_copied()) of_copied = places(apart);
    }
    alignas(64) int32_t sums[MOST * LANES] = {};
    for (const WindowTile& some : windows.tiles) {
      const Tile tile{sums, some.rows, LANES, width, column, some.pixel, column, some.order};
      if (j.end_form == ANY) bring_near(j.t, tile);
      const int32_t* places = c.taps == 1 ? c.places + starts[0] : (some.order ? of_copied : of_stored).data();
      for (int half = 0; half * HALF < width; ++half) {
        const int32_t *at = starts + 2 * half, *first = places + (at[0] - starts[0]);
        const int32_t *singles = first + (at[1] - at[0]), *last = first + (at[2] - at[0]);
        const Fours fours{c.weight + (int64_t)4 * HALF * at[0], first, singles, last};
        ADD_FOURS[tile.rows](fours, some.first, some.step, offset + half * HALF, sums + half * HALF);
      }
      end_rows(j, tile);
    }
  }

 private:
  const Job& j;
  const Conv& c;
  const int width, column, number;
  const int32_t *offset, *starts;

  // The places of the fours of the panel in windows whose taps lie at `steps`.
  std::vector<int32_t> places(const std::vector<int64_t>& steps) const {
    const int32_t first = starts[0], last = starts[2 * (c.panel / HALF)];
    std::vector<int32_t> found(last - first);
    for (int32_t i = first; i < last; ++i) found[i - first] = c.places[i] + (int32_t)steps[c.four_taps[i]];
    return found;
  }
};

}  // namespace

void by_fours(const Job& j, int first, int count, int64_t begin, int64_t end) {
  for (int p = first; p < first + count;) {
    const int group = p / j.c.panels;
    const Windows windows(j, group, begin, end);
    for (; p < first + count && p / j.c.panels == group; ++p) Panel(j, group, p % j.c.panels)(windows);
  }
}
#endif
