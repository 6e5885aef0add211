// What a warp has in flight of wgmma: products, and the registers that they add to.
#pragma once

#include "machine.h"

namespace cheetah_emulator {

constexpr uint32_t products_in_flight = 64;
constexpr uint32_t sums_in_flight = 8;
constexpr uint32_t most_columns = 256;

struct Matrix {  // operand B in shared memory: 16 rows (k) of `columns`, as core matrices of 8 columns x 8 of k
  const uint8_t* start;
  uint32_t leading, stride, columns;  // bytes between core matrices: along k, along the columns
  bool transposed;                    // 16 bytes of a core matrix are of one k, not of one column
};

struct Sums {  // accumulators in flight; the lanes' own registers are poisoned meanwhile
  float* places[warp_lanes];
  float values[warp_lanes][most_columns / 2];
  uint32_t columns, products;
};

struct Product {
  const uint32_t* a_places[warp_lanes];
  uint32_t a[warp_lanes][4];
  Matrix b;
  uint64_t b_digest;
  Sums* sums;
  uint32_t group;
  Place place;
  const char* primitive;
  const void* caller;
  void* sanitizer_fibre;
};

struct WarpProducts {
  Product products[products_in_flight];  // in the order in which they were issued
  Sums sums[sums_in_flight];
  uint32_t count, groups;                // groups: committed so far
  uint64_t sequence;                     // a digest of all that the warp has issued
  char order;
};

}  // namespace cheetah_emulator
