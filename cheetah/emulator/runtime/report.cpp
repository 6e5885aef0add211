// Who waits where: one line for each (block, place, state), with the threads that share it.
#include "report.h"

#include <cstdio>
#include <vector>

#include "machine.h"
#include "ranks.h"

namespace cheetah_emulator {
namespace {

constexpr size_t most_lines = 100;

std::string text(const char* format, auto... values) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, format, values...);
  return buffer;
}

std::string global_name(const void* address) {
  const auto* byte = static_cast<const uint8_t*>(address);
  for (uint32_t i = 0; i < machine.buffer_count; i++) {
    const Buffer& buffer = machine.buffers[i];
    if (byte >= buffer.start && byte < buffer.start + buffer.bytes)
      return text("%s+%ld", buffer.name, long(byte - buffer.start));
  }
  return text("%p", address);
}

std::string lost_wake(const Fibre& fibre) {
  return words_are_there(fibre) ? "; there now, but written by a plain store: publish it with a primitive" : "";
}

uint32_t exited(const Block& block) { return block.thread_count - block.live_threads; }

std::string barrier_state(const Fibre& fibre) {
  const auto& barrier = *static_cast<const NamedBarrier*>(fibre.wait.object);
  const Block& block = *fibre.block_state;
  std::string state = fibre.wait.value ? text("barrier %u; ", unsigned(fibre.wait.value)) : "";
  state += text("arrived %u/%u", barrier.arrived, barrier.expected);
  if (exited(block)) state += text("; %u threads have exited", exited(block));
  return state;
}

std::string mbarrier_state(const Fibre& fibre) {
  const auto& barrier = *static_cast<const MBarrier*>(fibre.wait.object);
  const auto* storage = reinterpret_cast<const uint8_t*>(barrier.storage);
  return text("parity %u; phase %u pending %u/%u tx %ld; mbarrier at shared+%ld", unsigned(fibre.wait.value),
              barrier.phase, barrier.pending, barrier.arrivals, long(barrier.transaction_bytes),
              long(storage - fibre.block_state->arena));
}

// Threads that wait for different words of one epoch or tag share a line: the state is that of the first.
std::string flags_state(const Fibre& fibre) {
  const auto* words = static_cast<const uint64_t*>(fibre.wait.object);
  std::string state = text("epoch %u; words carry", unsigned(fibre.wait.value));
  for (uint32_t i = 0; i < words_together; i++) state += text(" %u", unsigned(words[i] >> 32));
  return state + "; " + global_name(words) + lost_wake(fibre);
}

unsigned number_of_tag(uint64_t tag) { return unsigned(tag >> 14 & 1 | tag >> 29 & 2); }

std::string tags_state(const Fibre& fibre) {
  const auto* words = static_cast<const uint32_t*>(fibre.wait.object);
  std::string state = text("tag %u; words carry", number_of_tag(fibre.wait.value));
  for (uint32_t i = 0; i < words_together; i++) state += text(" %u", number_of_tag(words[i]));
  return state + "; " + global_name(words) + lost_wake(fibre);
}

std::string at_least_state(const Fibre& fibre) {
  const auto* word = static_cast<const uint64_t*>(fibre.wait.object);
  return text("wants %lu; is %lu; ", (unsigned long)fibre.wait.value, (unsigned long)*word) + global_name(word) +
         lost_wake(fibre);
}

std::string state_of(const Fibre& fibre) {
  switch (fibre.wait.kind) {
    case WaitKind::collective: return text("lanes %d/%d", __builtin_popcount(fibre.warp->arrived),
                                           __builtin_popcount(fibre.warp->lanes));
    case WaitKind::barrier: return barrier_state(fibre);
    case WaitKind::mbarrier: return mbarrier_state(fibre);
    case WaitKind::flags: return flags_state(fibre);
    case WaitKind::tags: return tags_state(fibre);
    case WaitKind::at_least: return at_least_state(fibre);
    case WaitKind::none: return "runnable";
  }
  return "";
}

std::string line_start(const Fibre& fibre) {
  std::string start = block_name(*fibre.block_state) + ": ";
  if (fibre.finished) return start + "exited";
  if (!fibre.wait.primitive) return start + "before its first primitive [runnable";
  return start + text("%s at %s:%u [", fibre.wait.primitive, fibre.wait.place.file_name(),
                      unsigned(fibre.wait.place.line())) + state_of(fibre);
}

struct Line {
  Wait wait;
  bool finished;
  std::string start, threads;
  uint32_t first, last;
  uint32_t other_words;  // waits for other words than the first thread's
};

bool waits_for_words(WaitKind kind) { return kind == WaitKind::flags || kind == WaitKind::tags; }

bool shares_line(const Line& line, const Fibre& fibre) {
  if (fibre.finished || line.finished) return fibre.finished && line.finished;
  const Wait &ours = line.wait, &its = fibre.wait;
  return ours.primitive == its.primitive && ours.place.line() == its.place.line() && ours.kind == its.kind &&
         (ours.kind == WaitKind::none ||
          (ours.value == its.value && (waits_for_words(ours.kind) || ours.object == its.object)));
}

void close_range(Line& line) {
  if (!line.threads.empty()) line.threads += ", ";
  line.threads += line.first == line.last ? text("%u", line.first) : text("%u-%u", line.first, line.last);
}

void add(std::vector<Line>& lines, size_t block_start, const Fibre& fibre) {
  for (size_t i = block_start; i < lines.size(); i++) {
    Line& line = lines[i];
    if (!shares_line(line, fibre)) continue;
    if (line.last + 1 != fibre.thread) {
      close_range(line);
      line.first = fibre.thread;
    }
    line.last = fibre.thread;
    line.other_words += waits_for_words(line.wait.kind) && line.wait.object != fibre.wait.object;
    return;
  }
  lines.push_back({fibre.wait, fibre.finished, line_start(fibre), "", fibre.thread, fibre.thread, 0});
}

std::string finished_text(Line& line) {
  close_range(line);
  std::string result = line.start;
  if (line.other_words) result += text("; %u threads want other words", line.other_words);
  if (!line.finished) result += "]";
  return result + ": threads " + line.threads + "\n";
}

std::string copies_text() {
  const std::string stores = machine.late_stores ? text("%u stores to other ranks under way\n", machine.late_stores) : "";
  return (machine.copies_in_flight ? text("%u bulk copies in flight\n", machine.copies_in_flight) : "") + stores;
}

}  // namespace

std::string waiting_report() {
  std::vector<Line> lines;
  for (uint32_t b = 0; b < machine.block_count; b++) {
    const Block& block = machine.blocks[b];
    const size_t block_start = lines.size();
    for (uint32_t t = 0; t < block.thread_count; t++) add(lines, block_start, machine.fibres[block.first_fibre + t]);
  }
  std::string report;
  for (size_t i = 0; i < lines.size() && i < most_lines; i++) report += finished_text(lines[i]);
  if (lines.size() > most_lines) report += text("and %lu lines more\n", (unsigned long)(lines.size() - most_lines));
  return report + copies_text();
}

}  // namespace cheetah_emulator
