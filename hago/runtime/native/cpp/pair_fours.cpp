// Which fours (see fours.cpp) are multiplied two at a time; part of packing weights.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace {

constexpr int BYTES = 32;  // of a four: four weights of eight channels
constexpr int SUMS = 32;   // of the positive weights of each pair, and of the negative ones

struct Four {
  int64_t number;
  int total;
  uint16_t sums[SUMS];

  Four(const int8_t* weight, int64_t number) : number(number), total(0), sums{} {
    for (int i = 0; i < BYTES; ++i) {
      const int w = weight[number * BYTES + i];
      sums[i / 2 + (w < 0 ? SUMS / 2 : 0)] += (uint16_t)std::abs(w);
      total += std::abs(w);
    }
  }
};

// Whether every sum of positive weights is at most `highest`, and of negative ones at most `lowest`.
bool fit(const Four& a, const Four& b, int highest, int lowest) {
  bool all = true;
  for (int i = 0; i < SUMS / 2; ++i) all &= a.sums[i] + b.sums[i] <= highest;
  for (int i = SUMS / 2; i < SUMS; ++i) all &= a.sums[i] + b.sums[i] <= lowest;
  return all;
}

}  // namespace

// Pairs the fours of every vector of channels: each, from those with the largest weights on, with the first that fits
// beside it, of as many as TRIES, so that the time grows with the number of fours and not with its square.
//
// weight  of the fours, for 8 channels of a vector
// firsts  the number of the first four of every vector, and of all
// most    the largest byte by which they are multiplied, from 1 to 255
// order   the numbers of the fours of each vector: pairs, one after the other, then the others
// paired  how many fours of each vector are in pairs
extern "C" void hago_pair_fours(const int8_t* weight, const int64_t* firsts, int64_t vectors, int32_t most,
                                int64_t* order, int32_t* paired) {
  constexpr size_t TRIES = 1024;
  const int highest = INT16_MAX / most, lowest = (INT16_MAX + 1) / most;  // that 16 bits hold, multiplied by `most`
  for (int64_t v = 0; v < vectors; ++v) {
    std::vector<Four> fours;
    for (int64_t number = firsts[v]; number < firsts[v + 1]; ++number) fours.emplace_back(weight, number);
    std::stable_sort(fours.begin(), fours.end(), [](const Four& a, const Four& b) { return a.total > b.total; });
    std::vector<bool> taken(fours.size());
    std::vector<int64_t> alone;
    int64_t* to = order + firsts[v];
    for (size_t i = 0; i < fours.size(); ++i) {
      if (taken[i]) continue;
      const size_t last = std::min(fours.size(), i + 1 + TRIES);
      size_t other = i + 1;
      while (other < last && (taken[other] || !fit(fours[i], fours[other], highest, lowest))) ++other;
      if (other == last) {
        alone.push_back(fours[i].number);
        continue;
      }
      taken[other] = true;
      *to++ = fours[i].number;
      *to++ = fours[other].number;
    }
    paired[v] = (int32_t)(to - order - firsts[v]);
    std::copy(alone.begin(), alone.end(), to);
  }
}
