// Products of a matrix of which two of every four neighbouring columns are there, and what feeds them.
#include "rendezvous.h"
#include "tiles.h"

namespace cheetah_emulator {
namespace {

// A, as lanes hold it: row g + 8 * lower of lane 4g + t has in group 4 * half + t the pair a[2 * half + lower]. Where in
// its group each of the pair belongs is a nibble of the word of lane 4g + 2 * selector + half.
void multiply(Warp& warp, uint32_t selector, Place place, const char* primitive) {
  float b[32][8], c[16][8];
  for (uint32_t lane = 0; lane < warp_lanes; lane++) {
    const Slot& slot = warp.slots[lane];
    const uint32_t g = lane / 4, t = lane % 4;
    for (uint32_t part = 0; part < 4; part++) {
      b[8 * part + 2 * t][g] = low(slot.b[part]);
      b[8 * part + 2 * t + 1][g] = high(slot.b[part]);
      c[g + part / 2 * 8][2 * t + part % 2] = slot.c[part];
    }
  }
  for (uint32_t row = 0; row < 16; row++) {
    const uint32_t g = row % 8, lower = row / 8;
    for (uint32_t group = 0; group < 8; group++) {
      const uint32_t half = group / 4, t = group % 4;
      const uint32_t nibble = warp.slots[4 * g + 2 * selector + half].metadata >> (16 * lower + 4 * t) & 15;
      const uint32_t first = nibble & 3, second = nibble >> 2;
      if (first >= second)
        misuse(place, primitive, "metadata of row %u, columns %u to %u: places %u and %u are not in order", row,
               4 * group, 4 * group + 3, first, second);
      const uint32_t pair = warp.slots[4 * g + t].a[2 * half + lower];
      const float values[2] = {low(pair), high(pair)};
      const uint32_t places[2] = {first, second};
      for (uint32_t i = 0; i < 2; i++)
        for (uint32_t column = 0; column < 8; column++) c[row][column] += values[i] * b[4 * group + places[i]][column];
    }
  }
  for (uint32_t lane = 0; lane < warp_lanes; lane++)
    for (uint32_t i = 0; i < 4; i++) warp.slots[lane].c[i] = c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

// The same of bytes: row g + 8 * lower of lane 4g + t has in groups 2t + 8 * half and the next the bytes of
// a[2 * half + lower]; the places of groups 8 * half .. are in the word of lane 4g + 2 * half + lower.
void multiply_sparse_bytes(Warp& warp, Place place, const char* primitive) {
  int8_t b[64][8];
  for (uint32_t lane = 0; lane < warp_lanes; lane++)
    for (uint32_t byte = 0; byte < 16; byte++)
      b[16 * (byte / 4) + 4 * (lane % 4) + byte % 4][lane / 4] = int8_t(warp.slots[lane].b[byte / 4] >> byte % 4 * 8);
  int32_t c[16][8] = {};
  for (uint32_t row = 0; row < 16; row++) {
    const uint32_t g = row % 8, lower = row / 8;
    for (uint32_t group = 0; group < 16; group++) {
      const uint32_t half = group / 8, t = group % 8 / 2;
      const uint32_t nibble = warp.slots[4 * g + 2 * half + lower].metadata >> group % 8 * 4 & 15;
      const uint32_t places[2] = {nibble & 3, nibble >> 2};
      if (places[0] >= places[1])
        misuse(place, primitive, "metadata of row %u, columns %u to %u: places %u and %u are not in order", row,
               4 * group, 4 * group + 3, places[0], places[1]);
      const uint32_t pair = warp.slots[4 * g + t].a[2 * half + lower] >> group % 2 * 16;
      for (uint32_t i = 0; i < 2; i++)
        for (uint32_t column = 0; column < 8; column++)
          c[row][column] += int8_t(pair >> 8 * i) * b[4 * group + places[i]][column];
    }
  }
  for (uint32_t lane = 0; lane < warp_lanes; lane++)
    for (uint32_t i = 0; i < 4; i++) {
      int32_t& sum = warp.slots[lane].sums_of_bytes[i];
      sum = int32_t(uint32_t(sum) + uint32_t(c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]));
    }
}

}  // namespace

void mma_2of4_bytes(int32_t* c, const uint32_t* a, const uint32_t* b, uint32_t metadata, Place place) {
  require_whole_warp(place, "mma_2of4_s8");
  Slot& slot = my_slot();
  for (int i = 0; i < 4; i++) {
    slot.a[i] = a[i];
    slot.b[i] = b[i];
    slot.sums_of_bytes[i] = c[i];
  }
  slot.metadata = metadata;
  rendezvous(Collective::mma_2of4_bytes, place, "mma_2of4_s8",
             [=](Warp& warp) { multiply_sparse_bytes(warp, place, "mma_2of4_s8"); });
  for (int i = 0; i < 4; i++) c[i] = slot.sums_of_bytes[i];
}

void mma_2of4(float* c, const uint32_t* a, const uint32_t* b, uint32_t metadata, uint32_t selector, Place place,
              const char* primitive) {
  require_whole_warp(place, primitive);
  Slot& slot = my_slot();
  for (int i = 0; i < 4; i++) {
    slot.a[i] = a[i];
    slot.b[i] = b[i];
    slot.c[i] = c[i];
  }
  slot.metadata = metadata;
  rendezvous(Collective::mma_2of4, place, primitive,
             [=](Warp& warp) { multiply(warp, selector, place, primitive); });
  for (int i = 0; i < 4; i++) c[i] = slot.c[i];
}

// Lane 8m + r says where row r of matrix m is; lane 4r + t gets those of row r of each matrix.
uint32_t* const* rows_of_lanes(const void* row, Place place, const char* primitive) {
  require_whole_warp(place, primitive);
  if (reinterpret_cast<uint64_t>(row) % 16) misuse(place, primitive, "%p is no multiple of 16 bytes", row);
  Slot& slot = my_slot();
  slot.row = const_cast<void*>(row);
  rendezvous(Collective::rows, place, primitive, [](Warp& warp) {
    for (uint32_t lane = 0; lane < warp_lanes; lane++)
      for (uint32_t matrix = 0; matrix < 4; matrix++)
        warp.slots[lane].rows[matrix] = static_cast<uint32_t*>(warp.slots[8 * matrix + lane / 4].row);
  });
  return slot.rows;
}

}  // namespace cheetah_emulator
