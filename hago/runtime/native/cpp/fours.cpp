// Convolutions of bytes whose weights are split into fours, of which the sums of pairs of products fit 16 bits whatever
// the input (`fours_that_fit` of weights.py): VPMADDUBSW, which saturates such sums, is exact.
#include "accumulate.h"
#include "conv.h"

#ifdef HAGO_PAIRS
namespace {

constexpr int HALF = LANES / 2;  // channels of a four: a vector of sums
constexpr int MOST = 12;         // rows of a tile: as many as there are registers for their sums

// The fours of a half of a panel: those in pairs, whose products are added in 16 bits, and the others.
struct Fours {
  const int8_t* weight;
  const int32_t *pairs, *singles, *end;  // their places in a window
};

// Adds products of R windows of bytes, `step` from one to the next, to `offset`. Three windows are addressed by one
// register; where each takes its own, as compilers would have it, there are too few.
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
      for (int r = 0; r < std::min(3, R - 3 * i); ++r) {
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
constexpr AddFours ADD_FOURS[MOST + 1] = {nullptr, add_fours<1>, add_fours<2>, add_fours<3>, add_fours<4>, add_fours<5>, add_fours<6>, add_fours<7>, add_fours<8>, add_fours<9>, add_fours<10>, add_fours<11>, add_fours<12>};

// Windows that lie `step` bytes apart: where they are stored, or copied.
struct Rows {
  const uint8_t* first;
  int64_t step, pixel;
  int count;
  const int64_t* order;  // the pixels of copied windows; null for those that follow one another from `pixel` on
};

// The windows of a group of the pixels [begin, end), in rows of nearly one length. Those that lie across an edge of an
// image, or in no rows of one step, are copied.
class Windows {
 public:
  std::vector<Rows> rows;

  Windows(const Job& j, int group, int64_t begin, int64_t end) : j(j), from(group * (j.c.channels / j.c.groups)) {
    if (is_pointwise(j)) add(j.x + begin * j.c.channels + from, j.c.channels, begin, end - begin);
    else add_places(begin, end);
  }

  // From the first byte of a copied window to that of each tap; empty where there are no copies.
  std::vector<int64_t> copied_steps() const {
    std::vector<int64_t> steps;
    for (int k = 0; k < j.c.taps && !copies.empty(); ++k) steps.push_back((int64_t)k * j.c.depth);
    return steps;
  }

 private:
  const Job& j;
  const int from;
  std::vector<uint8_t> copies;
  std::vector<int64_t> outside;

  void add(const uint8_t* first, int64_t step, int64_t pixel, int64_t count, const int64_t* order = nullptr) {
    for (int64_t left = (count + MOST - 1) / MOST; left > 0; --left) {
      const int some = (int)((count + left - 1) / left);
      rows.push_back({first, step, pixel, some, order});
      first += some * step;
      pixel += some;
      count -= some;
      if (order) order += some;
    }
  }

  void add_places(int64_t begin, int64_t end) {
    const std::vector<Place> places = places_of(j, begin, end);
    const int64_t across = j.c.stride_w * j.c.channels, window = (int64_t)j.c.taps * j.c.depth;
    const bool near = j.steps.back() <= INT32_MAX - j.c.depth;  // as far as a place of a four can say
    const auto stands = [&](int64_t pixel) { return near && places[pixel - begin].inside; };
    for (int64_t pixel = begin, until; pixel < end; pixel = until) {
      until = pixel + 1;
      if (!stands(pixel)) {
        outside.push_back(pixel);
        continue;
      }
      const uint8_t* first = places[pixel - begin].first;
      while (until < end && stands(until) && places[until - begin].first == first + (until - pixel) * across) ++until;
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
        offset(c.offset + number * c.panel), starts(c.fours + (int64_t)2 * number * (c.panel / HALF)) {}

  void operator()(const Windows& windows) {
    const std::vector<int64_t> apart = windows.copied_steps();
    inside = places(j.steps, inside_room);
    copied = apart.empty() ? nullptr : places(apart, copied_room);
    if (j.end_form == QUICK && width == LANES && is_straight(j.t.output[0])) {
      const Output& o = j.t.output[0];
      const Quick<1> quick(o, column, width);
      return each_tile(windows.rows, [&](const Tile& tile) __attribute__((always_inline)) {
        for (int r = 0; r < tile.rows; ++r) {
          quick.straight(tile.sums + r * LANES, reinterpret_cast<uint8_t*>(o.data) + tile.at(r) * o.stride + column);
        }
      });
    }
    each_tile(windows.rows, [&](const Tile& tile) __attribute__((always_inline)) { end_rows(j, tile); });
  }

 private:
  const Job& j;
  const Conv& c;
  const int width, column, number;
  const int32_t *offset, *starts;
  const int32_t *inside, *copied;  // the places of the fours in windows as they are stored, and as they are copied
  std::vector<int32_t> inside_room, copied_room;

  // The places of the fours of the panel where taps lie at `steps`.
  const int32_t* places(const std::vector<int64_t>& steps, std::vector<int32_t>& room) const {
    const int32_t first = starts[0], last = starts[2 * (c.panel / HALF)];
    if (c.taps == 1) return c.places + first;
    for (int32_t four = first; four < last; ++four) room.push_back(c.places[four] + (int32_t)steps[c.four_taps[four]]);
    return room.data();
  }

  template <typename End>
  ALWAYS void each_tile(const std::vector<Rows>& rows, End end_of) const {
    alignas(64) int32_t sums[MOST * LANES] = {};
    for (const Rows& some : rows) {
      const Tile tile{sums, some.count, LANES, width, column, some.pixel, column, some.order};
      if (j.end_form == ANY) bring_near(j.t, tile);
      const int32_t* places = (some.order ? copied : inside) - starts[0];
      for (int half = 0; half * HALF < width; ++half) {
        const int32_t* at = starts + 2 * half;
        const Fours fours{c.weight + (int64_t)4 * HALF * at[0], places + at[0], places + at[1], places + at[2]};
        ADD_FOURS[some.count](fours, some.first, some.step, offset + half * HALF, sums + half * HALF);
      }
      end_of(tile);
    }
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
#else
void by_fours(const Job&, int, int, int64_t, int64_t) {}
#endif

// Pairs fours of which 16 bits hold the sums of the products of both, for every vector of channels by itself: each, from
// those with the largest weights on, with the first one that fits beside it.
//
// weight  of the fours, for 8 channels of a vector
// firsts  the number of the first four of every vector, and of all
// most    the largest byte by which they are multiplied
// order   the numbers of the fours of each vector, those in pairs first
// paired  how many of each vector are in pairs
extern "C" void hago_pair_fours(const int8_t* weight, const int64_t* firsts, int64_t vectors, int32_t most,
                                int64_t* order, int32_t* paired) {
  constexpr int CHANNELS = 8, SUMS = 4 * CHANNELS, TRIES = 1024;
  struct Four {
    int64_t number;
    int total;
    uint8_t sums[SUMS];  // of the positive weights of every pair of products, and of the negative ones
  };
  const int highest = INT16_MAX / most, lowest = (INT16_MAX + 1) / most;
  for (int64_t v = 0; v < vectors; ++v) {
    std::vector<Four> fours;
    for (int64_t number = firsts[v]; number < firsts[v + 1]; ++number) {
      Four four{number, 0, {}};
      for (int i = 0; i < 4 * CHANNELS; ++i) {
        const int w = weight[number * 4 * CHANNELS + i];
        four.sums[i / 2 + (w < 0 ? SUMS / 2 : 0)] += (uint8_t)std::abs(w);
        four.total += std::abs(w);
      }
      fours.push_back(four);
    }
    std::stable_sort(fours.begin(), fours.end(), [](const Four& a, const Four& b) { return a.total > b.total; });
    const auto fit = [&](const Four& a, const Four& b) {
      bool all = true;
      for (int i = 0; i < SUMS; ++i) all &= a.sums[i] + b.sums[i] <= (i < SUMS / 2 ? highest : lowest);
      return all;
    };
    std::vector<bool> taken(fours.size());
    std::vector<int64_t> alone;
    int64_t* to = order + firsts[v];
    for (size_t i = 0; i < fours.size(); ++i) {
      if (taken[i]) continue;
      size_t other = i + 1;
      const size_t last = std::min(fours.size(), i + TRIES);
      while (other < last && (taken[other] || !fit(fours[i], fours[other]))) ++other;
      if (other < last) {
        taken[other] = true;
        *to++ = fours[i].number;
        *to++ = fours[other].number;
      } else {
        alone.push_back(fours[i].number);
      }
    }
    paired[v] = (int32_t)(to - order - firsts[v]);
    std::copy(alone.begin(), alone.end(), to);
  }
}
