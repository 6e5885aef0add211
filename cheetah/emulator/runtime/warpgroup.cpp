// wgmma: products that four warps issue together and that read their operands at any time until they are waited for.
//
// A product is worked out when it is issued, from operands as they are then. That they are the same when it is waited
// for is checked: shared memory by a digest (a bulk copy over it is refused at once), the registers of A word by word.
// Accumulators in flight are kept apart, and the lane's own registers poisoned: reading one gives NaN, storing to one is
// noticed. What a wgmma_fence is for is checked too: registers must be as the warp's last fence found them, so each
// lane's stack is copied at a fence. A warp does not wait for the three others, since nothing promises that they are
// near; that all four have issued the same is looked at when the block ends.
//
// For the race detector a product is a fibre of its own, as a bulk copy is, and reads when it is issued and waited for.
#include "warpgroup.h"

#include "memory.h"
#include "rendezvous.h"
#include "sanitizer.h"
#include "tiles.h"
#include "watch.h"

namespace cheetah_emulator {
namespace {

constexpr uint8_t poisoned = 0xFF;
constexpr uint32_t core_bytes = 128, warps_a_group = 4;

uint64_t mixed(uint64_t digest, uint64_t word) {
  digest = (digest ^ word) * 0x9E3779B97F4A7C15ull;
  return digest ^ digest >> 29;
}

const uint8_t* core_matrix(const Matrix& b, uint32_t k_half, uint32_t group) {
  return b.start + k_half * b.leading + group * b.stride;
}

template <class Visit>
void each_core_matrix(const Matrix& b, Visit visit) {
  for (uint32_t half = 0; half < 2; half++)
    for (uint32_t group = 0; group < b.columns / 8; group++) visit(core_matrix(b, half, group));
}

uint64_t digest_of(const Matrix& b) {
  uint64_t digest = 0;
  each_core_matrix(b, [&](const uint8_t* core) {
    for (uint32_t i = 0; i < core_bytes; i += 8) digest = mixed(digest, *reinterpret_cast<const uint64_t*>(core + i));
  });
  return digest;
}

// -- operand B

void check_order(const Matrix& b, Place place, const char* primitive) {
  const uint32_t groups = b.columns / 8;
  if (b.leading < core_bytes || (groups > 1 && b.stride < core_bytes))
    misuse(place, primitive, "core matrices %u bytes apart along k and %u along the columns: each has %u bytes",
           b.leading, b.stride, core_bytes);
  for (uint32_t group = 1; group < groups; group++) {
    const int64_t distance = int64_t(b.leading) - int64_t(group) * b.stride;
    if (distance < int64_t(core_bytes) && -distance < int64_t(core_bytes))
      misuse(place, primitive, "core matrices %u bytes apart along k and %u along the columns overlap: the second of"
             " k lies over number %u of the columns", b.leading, b.stride, group);
  }
}

Matrix matrix_of(uint64_t descriptor, uint32_t columns, bool transposed, Place place, const char* primitive) {
  if (descriptor >> 49) misuse(place, primitive, "a descriptor with a swizzle or base offset, which is not emulated");
  const Block& block = *machine.current->block_state;
  const uint32_t first = uint32_t(descriptor & 0x3FFF) << 4;
  const Matrix b = {block.arena + first, uint32_t(descriptor >> 16 & 0x3FFF) << 4,
                    uint32_t(descriptor >> 32 & 0x3FFF) << 4, columns, transposed};
  check_order(b, place, primitive);
  const uint64_t end = uint64_t(first) + b.leading + uint64_t(columns / 8 - 1) * b.stride + core_bytes;
  if (end > machine.shared_bytes)
    misuse(place, primitive, "operand B ends at byte %lu of the block's %lu bytes of shared memory",
           (unsigned long)end, (unsigned long)machine.shared_bytes);
  return b;
}

void tell_the_race_detector(const Product& product) {
  sanitizer::switch_to(product.sanitizer_fibre);
  each_core_matrix(product.b, [&](const uint8_t* core) { sanitizer::read_range(core, core_bytes, product.caller); });
}

// -- registers

// Not the C library's: the race detector intercepts that one, and would take this for an access of the kernel.
bool is_same(const void* one, const void* other, uint32_t bytes) {
  auto* first = static_cast<const uint32_t*>(one);
  auto* second = static_cast<const uint32_t*>(other);
  for (uint32_t i = 0; i < bytes / 4; i++)
    if (first[i] != second[i]) return false;
  return true;
}

bool is_variable(const Fibre& fibre, const void* byte) {
  return uint64_t(static_cast<const uint8_t*>(byte) - fibre.stack) < stack_bytes;
}

uint8_t* fenced_byte(const Fibre& fibre, const void* byte) {
  return fibre.fenced + (static_cast<const uint8_t*>(byte) - fibre.stack);
}

bool is_as_fenced(const Fibre& fibre, const void* place, uint32_t bytes) {
  const auto* byte = static_cast<const uint8_t*>(place);
  return fibre.fenced_from && byte >= fibre.fenced_from && is_same(fenced_byte(fibre, byte), byte, bytes);
}

[[noreturn]] void not_fenced(const Fibre& fibre, const char* what, Place place, const char* primitive) {
  misuse(place, primitive, "%s of thread %u were stored to after the warp's last wgmma_fence: put the fence behind what"
         " stores to them", what, fibre.thread);
}

Fibre& lane_of_warp(const Warp& warp, uint32_t lane) { return machine.fibres[warp.first_fibre + lane]; }

void check_registers(const Warp& warp, uint32_t columns, bool accumulate, bool chained, Place place,
                     const char* primitive) {
  for (uint32_t lane = 0; lane < warp_lanes; lane++) {
    const Fibre& fibre = lane_of_warp(warp, lane);
    const Slot& slot = warp.slots[lane];
    if (!is_variable(fibre, slot.a_place) || !is_variable(fibre, slot.sums))
      misuse(place, primitive, "operands of thread %u lie in memory: both must be variables, which are registers",
             fibre.thread);
    if (!is_as_fenced(fibre, slot.a_place, 16)) not_fenced(fibre, "registers of A", place, primitive);
    if (accumulate && !chained && !is_as_fenced(fibre, slot.sums, columns * 2))
      not_fenced(fibre, "accumulators", place, primitive);
  }
}

void poison_registers(Sums& sums) {
  for (uint32_t lane = 0; lane < warp_lanes; lane++) fill_bytes(sums.places[lane], poisoned, sums.columns * 2);
}

// The accumulators in flight that these registers are; null if they are not.
Sums* sums_of(WarpProducts& all, const Slot& slot, uint32_t columns, Place place, const char* primitive) {
  for (Sums& sums : all.sums) {
    if (!sums.products) continue;
    const float* first = sums.places[&slot - machine.current->warp->slots];
    if (first == slot.sums && sums.columns == columns) return &sums;
    if (slot.sums < first + sums.columns / 2 && first < slot.sums + columns / 2)
      misuse(place, primitive, "accumulators of which a part is in flight in a wgmma of another shape");
  }
  return nullptr;
}

Sums& new_sums(WarpProducts& all, const Warp& warp, uint32_t columns, Place place, const char* primitive) {
  for (Sums& sums : all.sums) {
    if (sums.products) continue;
    sums.columns = columns;
    for (uint32_t lane = 0; lane < warp_lanes; lane++) {
      sums.places[lane] = warp.slots[lane].sums;
      copy_bytes(sums.values[lane], warp.slots[lane].sums, columns * 2);
    }
    poison_registers(sums);
    return sums;
  }
  misuse(place, primitive, "more than %u different accumulators in flight", sums_in_flight);
}

// -- arithmetic

void gather_a(const Product& product, Operands& m) {
  for (uint32_t lane = 0; lane < warp_lanes; lane++) {
    const uint32_t g = lane / 4, pair = lane % 4 * 2;
    for (uint32_t word = 0; word < 4; word++) {
      m.a[g + 8 * (word & 1)][pair + 8 * (word >> 1)] = low(product.a[lane][word]);
      m.a[g + 8 * (word & 1)][pair + 8 * (word >> 1) + 1] = high(product.a[lane][word]);
    }
  }
}

void gather_b(const Matrix& b, uint32_t group, Operands& m) {
  for (uint32_t half = 0; half < 2; half++) {
    const auto* core = reinterpret_cast<const uint16_t*>(core_matrix(b, half, group));
    for (uint32_t column = 0; column < 8; column++)
      for (uint32_t k = 0; k < 8; k++)
        m.b[8 * half + k][column] = low(core[b.transposed ? k * 8 + column : column * 8 + k]);
  }
}

// Lane 4g + t holds, of the 8 columns of a group, rows g and g + 8 of columns 2t and 2t + 1.
template <class Move>
void each_sum(Sums& sums, uint32_t group, Operands& m, Move move) {
  for (uint32_t lane = 0; lane < warp_lanes; lane++)
    for (uint32_t i = 0; i < 4; i++)
      move(sums.values[lane][4 * group + i], m.c[lane / 4 + 8 * (i >> 1)][lane % 4 * 2 + (i & 1)]);
}

void work_out(const Product& product, bool accumulate) {
  Operands m;
  gather_a(product, m);
  for (uint32_t group = 0; group < product.b.columns / 8; group++) {
    gather_b(product.b, group, m);
    each_sum(*product.sums, group, m, [=](float& sum, float& c) { c = accumulate ? sum : 0.0f; });
    add_product(m);
    each_sum(*product.sums, group, m, [](float& sum, float& c) { sum = c; });
  }
}

// -- issue and wait

void check_group(const Warp& warp, Place place, const char* primitive) {
  const uint32_t index = uint32_t(&warp - machine.warps) % machine.warps_a_block;
  if (index / warps_a_group * warps_a_group + warps_a_group > machine.warps_a_block)
    misuse(place, primitive, "warp %u has no warpgroup: it needs %u warps, the first a multiple of them", index,
           warps_a_group);
}

void check_same(const Warp& warp, uint32_t lane, Place place, const char* primitive) {
  const Slot &first = warp.slots[0], &slot = warp.slots[lane];
  if (slot.descriptor != first.descriptor || slot.argument != first.argument)
    misuse(place, primitive, "lane %u gives another descriptor or another `accumulate` than lane 0", lane);
}

void issue(Warp& warp, uint32_t columns, bool transposed, const void* caller, Place place, const char* primitive) {
  WarpProducts& all = *warp.products;
  const Slot& slot = warp.slots[0];
  check_group(warp, place, primitive);
  for (uint32_t lane = 1; lane < warp_lanes; lane++) check_same(warp, lane, place, primitive);
  if (all.count == products_in_flight) misuse(place, primitive, "more than %u in flight", products_in_flight);
  const bool accumulate = slot.argument;
  // The slot of the lane that runs: whether registers are in flight is the same for all.
  Sums* sums = sums_of(all, my_slot(), columns, place, primitive);
  check_registers(warp, columns, accumulate, sums != nullptr, place, primitive);
  Product& product = all.products[all.count++];
  product.b = matrix_of(slot.descriptor, columns, transposed, place, primitive);
  product.b_digest = digest_of(product.b);
  product.sums = sums ? sums : &new_sums(all, warp, columns, place, primitive);
  product.sums->products++;
  product.group = all.groups;
  product.place = place;
  product.primitive = primitive;
  product.caller = caller;
  for (uint32_t lane = 0; lane < warp_lanes; lane++) {
    product.a_places[lane] = warp.slots[lane].a_place;
    copy_bytes(product.a[lane], warp.slots[lane].a, 16);
  }
  work_out(product, accumulate);
  all.sequence = mixed(mixed(all.sequence, slot.descriptor), columns * 2 + accumulate);
  product.sanitizer_fibre = sanitizer::enabled ? sanitizer::create_fibre("wgmma") : nullptr;
  tell_the_race_detector(product);
  sanitizer::switch_to(machine.current->sanitizer_fibre);
}

void check_unchanged(const Warp& warp, const Product& product, Place place, const char* primitive) {
  if (digest_of(product.b) != product.b_digest)
    misuse(place, primitive, "operand B of the %s of line %u has changed between its issue and this wait",
           product.primitive, unsigned(product.place.line()));
  for (uint32_t lane = 0; lane < warp_lanes; lane++)
    if (!is_same(product.a_places[lane], product.a[lane], 16))
      misuse(place, primitive, "thread %u has stored to the registers of A of the %s of line %u while it was in flight",
             lane_of_warp(warp, lane).thread, product.primitive, unsigned(product.place.line()));
}

// Gives the lanes their sums; a fence that was made meanwhile holds for them.
void give_back(const Warp& warp, const Sums& sums, const Product& product, Place place, const char* primitive) {
  const uint32_t bytes = sums.columns * 2;
  for (uint32_t lane = 0; lane < warp_lanes; lane++) {
    const Fibre& fibre = lane_of_warp(warp, lane);
    const auto* registers = reinterpret_cast<const uint8_t*>(sums.places[lane]);
    for (uint32_t i = 0; i < bytes; i++)
      if (registers[i] != poisoned)
        misuse(place, primitive, "thread %u has stored to accumulator %u of the %s of line %u while it was in flight",
               fibre.thread, i / 4, product.primitive, unsigned(product.place.line()));
    copy_bytes(sums.places[lane], sums.values[lane], bytes);
    copy_bytes(fenced_byte(fibre, sums.places[lane]), sums.values[lane], bytes);
  }
}

void complete(const Warp& warp, const Product& product, char& order, Place place, const char* primitive) {
  check_unchanged(warp, product, place, primitive);
  tell_the_race_detector(product);
  sanitizer::release(order);
  sanitizer::switch_to(machine.current->sanitizer_fibre);
  sanitizer::destroy_fibre(product.sanitizer_fibre);
  if (--product.sums->products == 0) give_back(warp, *product.sums, product, place, primitive);
}

void complete_groups(Warp& warp, uint32_t left, Place place, const char* primitive) {
  WarpProducts& all = *warp.products;
  uint32_t done = 0;
  // Group number g is over once all but `left` are: g + left < groups.
  while (done < all.count && uint64_t(all.products[done].group) + left < all.groups)
    complete(warp, all.products[done++], all.order, place, primitive);
  all.count -= done;
  for (uint32_t i = 0; i < all.count; i++) all.products[i] = all.products[i + done];
  all.sequence = mixed(all.sequence, left + 1);
}

void remember_stack(Fibre& fibre, const uint8_t* from) {
  fibre.fenced_from = from;
  copy_bytes(fenced_byte(fibre, from), from, size_t(fibre.stack + stack_bytes - from));
}

}  // namespace

uint64_t matrix_descriptor(const void* start, uint32_t leading, uint32_t stride, Place place) {
  constexpr const char* primitive = "matrix_descriptor";
  const Block& block = *machine.current->block_state;
  const auto* byte = static_cast<const uint8_t*>(start);
  if (byte < block.arena || byte >= block.arena + machine.shared_bytes)
    misuse(place, primitive, "%p lies outside this block's shared memory", start);
  const uint64_t offset = uint64_t(byte - block.arena);
  if (offset % 16 || leading % 16 || stride % 16)
    misuse(place, primitive, "byte %lu of shared memory, %u and %u bytes apart: all are multiples of 16",
           (unsigned long)offset, leading, stride);
  return offset >> 4 | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32;
}

[[gnu::noinline]] void wgmma_fence(Place place) {
  constexpr const char* primitive = "wgmma_fence";
  require_whole_warp(place, primitive);
  remember_stack(*machine.current, static_cast<const uint8_t*>(__builtin_frame_address(0)));
  rendezvous(Collective::wgmma_fence, place, primitive, [](Warp&) {});
}

[[gnu::noinline]] void wgmma(float* sums, const uint32_t* a, uint64_t descriptor, bool accumulate, uint32_t columns,
                             bool transposed, Place place, const char* primitive) {
  require_whole_warp(place, primitive);
  const void* caller = __builtin_return_address(0);
  Slot& slot = my_slot();
  slot.sums = sums;
  slot.a_place = a;
  for (int i = 0; i < 4; i++) slot.a[i] = a[i];
  slot.descriptor = descriptor;
  slot.argument = accumulate;
  watch::loads_have_read(*machine.current);  // an instruction is issued when the loads of its registers are over
  rendezvous(Collective::wgmma, place, primitive,
             [=](Warp& warp) { issue(warp, columns, transposed, caller, place, primitive); });
}

void wgmma_commit(Place place) {
  constexpr const char* primitive = "wgmma_commit";
  require_whole_warp(place, primitive);
  rendezvous(Collective::wgmma_commit, place, primitive, [](Warp& warp) { warp.products->groups++; });
}

void wgmma_wait(uint32_t left, Place place, const char* primitive) {
  require_whole_warp(place, primitive);
  rendezvous(Collective::wgmma_wait, place, primitive,
             [=](Warp& warp) { complete_groups(warp, left, place, primitive); });
  sanitizer::acquire(machine.current->warp->products->order);
}

void begin_products(WarpProducts& products) {
  products.count = products.groups = 0;
  products.sequence = 0;
  for (Sums& sums : products.sums) sums.products = 0;
}

void check_no_product_reads(const Block& block, const uint8_t* destination, uint32_t bytes, Place place) {
  const uint32_t first = block.index * machine.warps_a_block;
  for (uint32_t w = first; w < first + machine.warps_a_block; w++) {
    const WarpProducts& all = *machine.warps[w].products;
    for (uint32_t i = 0; i < all.count; i++) {
      const Product& product = all.products[i];
      each_core_matrix(product.b, [&](const uint8_t* core) {
        if (core + core_bytes <= destination || destination + bytes <= core) return;
        misuse(place, "bulk_copy", "overwrites operand B (from byte %ld of shared memory on) of the %s of line %u, which"
               " warp %u has in flight: the stage was given back before the wait", long(core - block.arena),
               product.primitive, unsigned(product.place.line()), w - first);
      });
    }
  }
}

void check_products_ended(const Block& block) {
  const Warp* warps = machine.warps + block.index * machine.warps_a_block;
  for (uint32_t w = 0; w < machine.warps_a_block; w++) {
    const WarpProducts& all = *warps[w].products;
    if (all.count)
      misuse(all.products[0].place, all.products[0].primitive, "still in flight when the block ended; wait for it");
    if (w / warps_a_group * warps_a_group + warps_a_group > machine.warps_a_block) continue;
    const Place place = warps[w].place;
    if (all.sequence != warps[w / warps_a_group * warps_a_group].products->sequence)
      misuse(place, "wgmma", "warp %u has issued or waited for other products than the first of its warpgroup", w);
  }
}

}  // namespace cheetah_emulator
