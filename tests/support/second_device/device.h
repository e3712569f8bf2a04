// What the device is made of: its memory, what it counts, and what a host that waits for it is told.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <torch/extension.h>

#include <cstdlib>
#include <mutex>
#include <utility>

#include "order.h"

namespace second_device {

using at::Tensor;
constexpr auto kKey = c10::DispatchKey::CUDA;
constexpr auto kType = c10::DeviceType::CUDA;
const c10::Device kDevice(kType, 0);

inline std::recursive_mutex lock;
inline Order order;
inline thread_local int64_t current_stream = 0;
inline int64_t next_stream = 1;

// ---- counts
inline std::map<std::string, uint64_t> counts;         // kernels, bytes, and each kind of wait and copy
inline std::map<std::string, uint64_t> kernels_by_op;  // name → launches
inline py::object* on_wait = nullptr;                  // called with what the host waits for
inline bool capturing = false;                         // as in torch.cuda.graph: a host that waits is an error
inline thread_local bool unwatched = false;
inline std::string error;  // of CUDA's runtime, which the next kernel raises

// The host waits for the device.
inline void waits(const std::string& what) {
  TORCH_CHECK(!capturing || unwatched, "CUDA error: operation not permitted when stream is capturing (", what, ")");
  {
    std::lock_guard<std::recursive_mutex> held(lock);
    ++counts["waits: " + what];
  }
  if (!on_wait || unwatched || !Py_IsInitialized()) return;
  unwatched = true;
  {
    py::gil_scoped_acquire gil;
    try {
      (*on_wait)(what);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("on_wait");
    }
  }
  unwatched = false;
}

// ---- memory
inline size_t total = size_t(24) << 30, used = 0, most_used = 0;
inline int64_t fails_in = 0;  // allocations until one fails; 0: none does

// Blocks and what leaves.
inline size_t all_used() { return used + order.leaving; }

inline void take(size_t bytes) {
  const bool fails = fails_in > 0 && --fails_in == 0;
  if (all_used() + bytes > total) order.host_waits_for_what_leaves();
  if (fails || all_used() + bytes > total) ++counts["refused"];
  TORCH_CHECK_WITH(OutOfMemoryError, !fails && all_used() + bytes <= total, "CUDA out of memory. Tried to allocate ",
                   bytes, " bytes. GPU 0 has a total capacity of ", total, " bytes of which ", total - all_used(),
                   " is free.");
  used += bytes;
  most_used = std::max(most_used, all_used());
}

// The device's bytes are `bytes` at `at` from now on, and `at` a block of its memory.
inline void made(const void* at, size_t bytes) {
  std::lock_guard<std::recursive_mutex> held(lock);
  take(bytes);
  order.made(at, bytes, current_stream);
}

inline void freed(const void* at) {
  std::lock_guard<std::recursive_mutex> held(lock);
  auto block = order.blocks.find(at);
  if (block == order.blocks.end()) return;
  used -= block->second.bytes;
  order.freed(at);
}

inline void* aligned(size_t bytes) {
  void* at = nullptr;
  if (posix_memalign(&at, 64, std::max<size_t>(bytes, 64))) throw std::bad_alloc();
  return at;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = aligned(bytes);
    try {
      made(at, bytes);
    } catch (...) {
      std::free(at);
      throw;
    }
    std::memset(at, 0x7f, bytes);  // what nobody wrote is NaN in fp16, and large in the others
    return {at, at, &give_back, kDevice};
  }
  static void give_back(void* at) {
    freed(at);
    std::free(at);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline DeviceMemory device_memory;

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = aligned(bytes);
    std::lock_guard<std::recursive_mutex> held(lock);
    order.pinned[static_cast<char*>(at)] = std::max<size_t>(bytes, 64);
    counts["bytes page-locked as they came"] += bytes;
    return {at, at, &give_back, c10::Device(at::kCPU)};
  }
  // No hazard: PyTorch's allocator gives the memory to others when the streams that used it have come past
  static void give_back(void* at) {
    {
      std::lock_guard<std::recursive_mutex> held(lock);
      order.pinned.erase(static_cast<char*>(at));
    }
    std::free(at);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline PinnedMemory pinned_memory;

// ---- tensors
inline bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// A tensor laid out as another, on a storage of the device's.
inline Tensor on_device(c10::Storage storage, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(kKey), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// What a CPU kernel made, as memory of the device's: the same bytes.
inline c10::Storage taken_over(const Tensor& cpu) {
  struct Held {
    c10::Storage storage;
    const void* at;
  };
  const size_t bytes = cpu.storage().nbytes();
  const void* at = cpu.storage().data();
  if (at) made(at, bytes);
  c10::DataPtr data(const_cast<void*>(at), new Held{cpu.storage(), at},
                    [](void* context) {
                      auto* held = static_cast<Held*>(context);
                      if (held->at) freed(held->at);
                      delete held;
                    },
                    kDevice);
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), &device_memory, true);
}

// The device's bytes as the CPU's kernels take them.
inline Tensor as_cpu(const Tensor& tensor) {
  auto data = c10::DataPtr(const_cast<void*>(tensor.storage().data()), c10::Device(at::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data),
                       c10::GetAllocator(at::kCPU), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

// ---- launches
struct Launch {
  Access access;

  explicit Launch(std::string op) : access{current_stream, order.launch(current_stream), op} {
    ++counts["kernels"];
    ++kernels_by_op[op];
    const auto raised = std::exchange(error, "");
    TORCH_CHECK(raised.empty(), "CUDA error: ", raised);
  }
  void reads(const Tensor& tensor) { touches(tensor, false); }
  void writes(const Tensor& tensor) { touches(tensor, true); }

 private:
  void touches(const Tensor& tensor, bool writes) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    counts["bytes"] += tensor.nbytes();
    writes ? order.writes(tensor.storage().data(), access) : order.reads(tensor.storage().data(), access);
  }
};

// ---- random numbers: the CPU's, so that a seed gives the same on both
struct Generator final : c10::GeneratorImpl {
  c10::intrusive_ptr<at::CPUGeneratorImpl> cpu = c10::make_intrusive<at::CPUGeneratorImpl>();

  explicit Generator(int = 0) : GeneratorImpl(kDevice, c10::DispatchKeySet(kKey)) {}
  void set_current_seed(uint64_t seed) override { cpu->set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu->current_seed(); }
  uint64_t seed() override { return cpu->seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu->get_state(); }
  Generator* clone_impl() const override {
    auto* made = new Generator();
    made->cpu->set_state(*cpu->get_state());
    return made;
  }
};

inline const at::Generator& default_generator() {
  static at::Generator generator = at::make_generator<Generator>(0);
  return generator;
}

inline at::Generator cpu_generator(const at::Generator& generator) {
  return at::Generator(static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu);
}

}  // namespace second_device
