// What orders the accesses to a device's memory: a vector clock for each stream and one for the host. Two accesses that
// no clock orders are a hazard, as are a block that is given out again after it was freed, and page-locked memory that
// changes, while a stream uses it.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace second_device {

using Clock = std::vector<uint64_t>;  // by stream: how many of its launches are known to be over

inline void learn(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

struct Access {
  int64_t stream = 0;
  uint64_t time = 0;  // 0: none
  std::string op;

  bool before(const Clock& clock) const {
    return time == 0 || (static_cast<int64_t>(clock.size()) > stream && clock[stream] >= time);
  }
};

struct Block {  // of the device's memory
  size_t bytes = 0;
  int64_t stream = 0;  // that was current when it was made
  Access write;
  std::vector<Access> reads;
  std::set<int64_t> recorded;  // by record_stream
};

struct Leaving {  // a block that was freed, and stays until streams of record_stream have come past
  Clock when;
  size_t bytes;
};

struct Copy {  // between page-locked memory and the device, that the host does not wait for
  Access at;
  const char* host;
  size_t bytes;
  uint64_t sum;                  // of what the host's memory held; to the device
  std::function<void()> arrive;  // writes it; from the device
};

class Order {
 public:
  std::map<std::string, uint64_t> hazards;
  std::unordered_map<const void*, Block> blocks;
  std::map<const char*, size_t> pinned;
  size_t leaving = 0;  // bytes of blocks that were freed and are there still

  Clock& of(int64_t stream) {
    auto& clock = streams_[stream];
    if (static_cast<int64_t>(clock.size()) <= stream) clock.resize(stream + 1);
    return clock;
  }

  // A launch on a stream comes after all that the host knows to be over.
  uint64_t launch(int64_t stream) {
    auto& clock = of(stream);
    learn(clock, host_);
    return ++clock[stream];
  }

  void reads(const void* at, const Access& access) {
    auto* block = find(at);
    if (!block) return;
    if (!block->write.before(of(access.stream)))
      found(access.op + " reads what " + block->write.op + " writes on another stream");
    for (auto& read : block->reads)
      if (read.stream == access.stream) {
        read = access;
        return;
      }
    block->reads.push_back(access);
  }

  void writes(const void* at, const Access& access) {
    auto* block = find(at);
    if (!block) return;
    const auto& clock = of(access.stream);
    if (!block->write.before(clock))
      found(access.op + " writes what " + block->write.op + " writes on another stream");
    for (auto& read : block->reads)
      if (!read.before(clock)) found(access.op + " writes what " + read.op + " reads on another stream");
    block->write = access;
    block->reads.clear();
  }

  // PyTorch's allocator may give a stream any block that was made and freed on it, at once.
  void made(const void* at, size_t bytes, int64_t stream) {
    auto clock = of(stream);
    learn(clock, host_);
    for (auto& [_, access] : freed_[stream])
      if (!access.before(clock)) found("memory given out again while " + access.op + " uses it on another stream");
    freed_[stream].clear();
    blocks[at] = Block{bytes, stream, {}, {}, {}};
  }

  void freed(const void* at) {
    auto* block = find(at);
    if (!block) return;
    auto& last = freed_[block->stream];
    auto keep = [&](const Access& access) {
      if (access.stream != block->stream && !block->recorded.count(access.stream) &&
          last[access.stream].time < access.time)
        last[access.stream] = access;
    };
    keep(block->write);
    for (auto& read : block->reads) keep(read);
    Clock when;
    for (auto stream : block->recorded)
      if (stream != block->stream) {
        when.resize(std::max<size_t>(when.size(), stream + 1));
        when[stream] = of(stream)[stream];
      }
    if (!knows(when)) {
      leaving_.push_back({when, block->bytes});
      leaving += block->bytes;
    }
    blocks.erase(at);
  }

  void recorded(const void* at, int64_t stream) {
    if (auto* block = find(at)) block->recorded.insert(stream);
  }

  void later(Copy copy) { copies_.push_back(std::move(copy)); }

  // The host has waited for this: what it copied from page-locked memory has to be as it was, what it copied to it arrives.
  void host_learns(Clock clock) {
    learn(host_, clock);
    std::erase_if(leaving_, [&](const Leaving& each) {
      if (knows(each.when)) leaving -= each.bytes;
      return knows(each.when);
    });
    std::vector<Copy> left, over;
    for (auto& copy : copies_) (copy.at.before(host_) ? over : left).push_back(std::move(copy));
    copies_ = std::move(left);
    for (auto& copy : over) {
      if (copy.arrive) copy.arrive();
      else if (is_pinned(copy.host) && sum(copy.host, copy.bytes) != copy.sum)
        found("page-locked memory changed while a copy reads it");
    }
  }

  // As PyTorch's allocator waits, before it has no memory.
  void host_waits_for_what_leaves() {
    Clock all;
    for (auto& each : leaving_) learn(all, each.when);
    if (!all.empty()) host_learns(all);
  }

  void host_learns_all() {
    Clock all;
    for (auto& [stream, clock] : streams_) learn(all, clock);
    host_learns(all);
  }

  bool is_pinned(const void* at) const {
    auto next = pinned.upper_bound(static_cast<const char*>(at));
    if (next == pinned.begin()) return false;
    --next;
    return static_cast<const char*>(at) < next->first + next->second;
  }

  bool unpin(const char* at) {
    auto range = pinned.find(at);
    if (range == pinned.end()) return false;
    for (auto& copy : copies_)
      if (copy.host >= range->first && copy.host < range->first + range->second && !copy.at.before(host_))
        found("page-locked memory given back while a copy uses it");
    pinned.erase(range);
    return true;
  }

  static uint64_t sum(const char* at, size_t bytes) {
    uint64_t hash = 1469598103934665603ull;
    for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<unsigned char>(at[i])) * 1099511628211ull;
    return hash;
  }

 private:
  std::map<int64_t, Clock> streams_;
  std::map<int64_t, std::map<int64_t, Access>> freed_;  // by a block's stream and its users': their last access
  Clock host_;
  std::vector<Copy> copies_;
  std::vector<Leaving> leaving_;

  // The device is as slow as it can be: what the host has not waited for is not over.
  bool knows(const Clock& when) const {
    for (size_t i = 0; i < when.size(); ++i)
      if (when[i] > (i < host_.size() ? host_[i] : 0)) return false;
    return true;
  }

  Block* find(const void* at) {
    auto it = blocks.find(at);
    return it == blocks.end() ? nullptr : &it->second;
  }

  void found(const std::string& what) { ++hazards[what]; }
};

}  // namespace second_device
