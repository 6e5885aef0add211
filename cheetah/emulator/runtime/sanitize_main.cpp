// A program under the race detector: a process of its own that reads what to launch from a file (sanitize.py).
//
// usage: program REQUEST RESULT. The request has one item a line; arrays are files, mapped and changed in place.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "launch.h"

using namespace cheetah_emulator;

namespace {

constexpr int most_parameters = 256;

struct Request {
  CheetahLaunch launch = {};
  Buffer buffers[most_parameters];
  char names[most_parameters][64];
  uint64_t values[most_parameters];
  void* arguments[most_parameters];
  int parameters = 0;
};

Request request;
char report[1 << 20];

[[noreturn]] void give_up(const char* what, const char* where) {
  std::fprintf(stderr, "cheetah emulator: %s %s\n", what, where);
  _exit(3);
}

void* map_file(const char* path, uint64_t bytes) {
  const int file = open(path, O_RDWR);
  if (file < 0) give_up("cannot open", path);
  void* start = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (start == MAP_FAILED) give_up("cannot map", path);
  close(file);
  return start;
}

void add_value(uint64_t value) {
  request.values[request.parameters] = value;
  request.arguments[request.parameters] = &request.values[request.parameters];
  request.parameters++;
}

void add_array(const char* name, const char* path, uint64_t bytes) {
  void* start = map_file(path, bytes);
  char* kept = request.names[request.launch.buffer_count];
  std::snprintf(kept, sizeof request.names[0], "%s", name);
  request.buffers[request.launch.buffer_count++] = {static_cast<const uint8_t*>(start), bytes, kept};
  add_value(reinterpret_cast<uint64_t>(start));
}

void read_line(const char* line) {
  CheetahLaunch& l = request.launch;
  char name[64], path[3000];
  uint64_t number;
  if (std::sscanf(line, "grid %u %u %u", &l.grid[0], &l.grid[1], &l.grid[2]) == 3) return;
  if (std::sscanf(line, "block %u %u %u", &l.block[0], &l.block[1], &l.block[2]) == 3) return;
  if (std::sscanf(line, "shared %" SCNu64, &l.shared_bytes) == 1) return;
  if (std::sscanf(line, "scheduler %u", &l.scheduler) == 1) return;
  if (std::sscanf(line, "seed %" SCNu64, &l.seed) == 1) return;
  if (std::sscanf(line, "switch_limit %" SCNu64, &l.switch_limit) == 1) return;
  if (std::sscanf(line, "chunk_limit %u", &l.chunk_limit) == 1) return;
  if (std::sscanf(line, "value %" SCNx64, &number) == 1) return add_value(number);
  if (std::sscanf(line, "array %63s %" SCNu64 " %2999[^\n]", name, &number, path) == 3)
    return add_array(name, path, number);
  give_up("cannot read the request line", line);
}

void read_request(const char* path) {
  FILE* file = std::fopen(path, "r");
  if (!file) give_up("cannot open", path);
  char line[4096];
  while (std::fgets(line, sizeof line, file)) read_line(line);
  std::fclose(file);
}

void write_region(FILE* file, const char* name, const void* start, uint64_t bytes) {
  std::fprintf(file, "region %" PRIx64 " %" PRIu64 " %s\n", reinterpret_cast<uint64_t>(start), bytes, name);
}

void write_result(const char* path) {
  const CheetahLaunch& l = request.launch;
  FILE* file = std::fopen(path, "w");
  if (!file) give_up("cannot write", path);
  std::fprintf(file, "outcome %u\n", l.outcome);
  std::fprintf(file, "counts %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %u\n", l.switches, l.collectives,
               l.copies, l.copied_bytes, l.most_chunks);
  for (uint32_t b = 0; b < machine.block_count; b++) {
    char name[64];
    std::snprintf(name, sizeof name, "shared memory of block %u", b);
    write_region(file, name, machine.blocks[b].arena, machine.shared_bytes);
  }
  for (uint32_t i = 0; i < l.buffer_count; i++)
    write_region(file, l.buffers[i].name, l.buffers[i].start, l.buffers[i].bytes);
  std::fprintf(file, "report\n%s", l.report);
  std::fclose(file);
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) give_up("usage:", "program REQUEST RESULT");
  read_request(words[1]);
  request.launch.arguments = request.arguments;
  request.launch.parameters = request.parameters;
  request.launch.ranks = 1;
  request.launch.buffers = request.buffers;
  request.launch.report = report;
  request.launch.report_bytes = sizeof report;
  cheetah_emulator_launch(&request.launch);
  write_result(words[2]);
  _exit(0);
}
