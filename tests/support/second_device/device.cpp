// A device in main memory that PyTorch takes for CUDA: the CPU wheel has no kernels of its own under that key.
// Each kernel is the CPU's on the same bytes. Tensors of two devices may not be mixed, as on a card.
#include "device.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

namespace second_device {
namespace {

using c10::IValue;
using Held = std::lock_guard<std::recursive_mutex>;
using Names = std::set<std::string>;

Names without_kernel;  // operations that CUDA has no kernel for
int capability = 86;
bool has_float64 = true;

// Where CUDA takes an index on the CPU
const Names kMixed{"aten::index",      "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
                   "aten::index_put",  "aten::set_",       "aten::_assert_async",    "aten::_unsafe_index_put"};
// Where CUDA takes not even a scalar of the CPU's
const Names kStrict{"aten::embedding",  "aten::index_select", "aten::gather",  "aten::scatter",
                    "aten::convolution", "aten::cat",         "aten::stack",   "aten::native_layer_norm",
                    "aten::mm",          "aten::addmm",       "aten::bmm",     "aten::native_group_norm",
                    "aten::baddbmm",     "aten::linear",      "aten::_int_mm", "aten::scaled_dot_product_attention",
                    "aten::_scaled_mm"};
// What has a size that the host has to ask for
const Names kSized{"aten::nonzero",            "aten::masked_select", "aten::equal",       "aten::_unique2",
                   "aten::unique_consecutive", "aten::unique_dim",    "aten::is_nonzero",  "aten::repeat_interleave",
                   "aten::bincount"};
// What launches nothing
const Names kFree{"aten::is_pinned", "aten::_fused_sdp_choice"};

void as_a_card_refuses(const std::string& name, const std::vector<IValue>& given) {
  TORCH_CHECK_NOT_IMPLEMENTED(!without_kernel.count(name), "Could not run '", name,
                              "' with arguments from the 'CUDA' backend.");
  if (name == "aten::_int_mm") {
    const auto a = given[0].toTensor(), b = given[1].toTensor();
    TORCH_CHECK(a.size(0) > 16, "self.size(0) needs to be greater than 16, but got ", a.size(0));
    for (auto size : {a.size(1), b.size(1)})
      TORCH_CHECK(size > 0 && size % 8 == 0, "needs to be greater than 0 and a multiple of 8, but got ", size);
  } else if (name == "aten::_scaled_mm") {
    const auto a = given[0].toTensor(), b = given[1].toTensor();
    TORCH_CHECK(capability >= 89, "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or "
                "8.9, or ROCm MI300+");
    TORCH_CHECK(a.stride(1) == 1 && b.stride(0) == 1, "Expected mat1 row-major and mat2 column-major");
    TORCH_CHECK(a.size(1) % 16 == 0 && b.size(1) % 16 == 0, "Expected trailing dimension to be divisible by 16");
  } else if (name == "aten::scaled_dot_product_attention") {
    const auto q = given[0].toTensor();
    const auto& chosen = at::globalContext();
    const auto type = q.scalar_type();
    const bool half = type == at::kHalf || type == at::kBFloat16;
    const bool flash = chosen.userEnabledFlashSDP() && half && given[3].isNone() && q.size(-1) <= 256 && capability >= 80;
    const bool efficient = chosen.userEnabledMemEfficientSDP() && type != at::kDouble &&
                           !(type == at::kBFloat16 && capability < 80);
    const bool cudnn = chosen.userEnabledCuDNNSDP() && half && capability >= 90;
    TORCH_CHECK(chosen.userEnabledMathSDP() || flash || efficient || cudnn, "No available kernel. Aborting execution.");
  }
}

// As an Apple GPU refuses
void may_be(at::ScalarType type) {
  TORCH_CHECK_TYPE(has_float64 || type != at::kDouble,
                   "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.");
}

// Whether an operation indexes by a mask, whose ones the host has to count
bool by_mask(const std::string& name, const std::vector<IValue>& given) {
  if (name != "aten::index") return false;
  for (auto& value : given)
    if (value.isOptionalTensorList())
      for (std::optional<Tensor> each : value.toOptionalTensorList())
        if (each && each->defined() && (each->scalar_type() == at::kBool || each->scalar_type() == at::kByte)) return true;
  return false;
}

// One call of an operation by the CPU's kernel. What it was given is turned into the CPU's, what it made is turned back.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), name_(schema_.name()), stack_(stack),
        begin_(stack->size() - schema_.arguments().size()), given_(stack->begin() + begin_, stack->end()) {}

  void run() {
    for (size_t i = 0; i < given_.size(); ++i) (*stack_)[begin_ + i] = inward(i);
    one_device();
    as_a_card_refuses(name_, given_);
    const bool waits_for_it = kSized.count(name_) || by_mask(name_, given_);
    if (waits_for_it) waits(name_);
    softmax_in_float();
    {
      at::AutoDispatchBelowADInplaceOrView below;
      c10::impl::ExcludeDispatchKeyGuard no_cast(c10::autocast_dispatch_keyset);
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    settle_what_was_written();
    outward();
    if (kFree.count(name_) || !(any_ || makes_)) return;
    Held held(lock);
    Launch launch(name_);
    for (auto& tensor : read_) launch.reads(tensor);
    for (auto& tensor : written_) launch.writes(tensor);
    if (waits_for_it) order.host_learns(order.of(current_stream));
  }

 private:
  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  torch::jit::Stack* stack_;
  const size_t begin_;
  std::vector<IValue> given_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> ours_;  // the CPU's view of a storage → the storage
  std::map<size_t, std::vector<Tensor>> as_given_;                  // by argument, as the CPU's kernel had them
  std::vector<Tensor> read_, written_, strangers_;
  bool any_ = false, makes_ = false;

  Tensor inward(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!is_here(tensor)) {
      if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) strangers_.push_back(tensor);
      return tensor;
    }
    any_ = true;
    read_.push_back(tensor);
    auto cpu = as_cpu(tensor);
    ours_.emplace(cpu.storage().unsafeGetStorageImpl(), tensor.storage());
    return cpu;
  }

  IValue inward(size_t i) {
    const IValue& value = given_[i];
    if (value.isTensor()) {
      as_given_[i] = {inward(value.toTensor())};
      return as_given_[i][0];
    }
    if (value.isTensorList()) {
      for (const Tensor& each : value.toTensorList()) as_given_[i].push_back(inward(each));
      return c10::List<Tensor>(as_given_[i]);
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (std::optional<Tensor> each : value.toOptionalTensorList())
        made.push_back(each ? std::optional<Tensor>(inward(*each)) : std::nullopt);
      return made;
    }
    if (value.isDevice() && value.toDevice().type() == kType) {
      makes_ = true;
      return c10::Device(at::kCPU);
    }
    if (value.isGenerator()) {
      const auto generator = value.toGenerator();
      TORCH_CHECK(!generator.defined() || generator.device().type() == kType,
                  "Expected a 'cuda' device type for generator but found '", generator.device().type(), "'");
      return generator.defined() ? IValue(cpu_generator(generator)) : value;
    }
    if (value.isNone() && schema_.arguments()[i].name() == "generator") return cpu_generator(default_generator());
    return value;
  }

  void one_device() {
    for (auto& tensor : strangers_) {
      const bool scalar = tensor.dim() == 0 && !kStrict.count(name_);
      TORCH_CHECK(scalar || kMixed.count(name_),
                  "Expected all tensors to be on the same device, but found at least two devices, ", kDevice, " and ",
                  tensor.device(), "! (when checking argument of ", name_, ")");
    }
  }

  // A card's softmax of fp16 into float32 widens in the kernel; the CPU has none
  void softmax_in_float() {
    if (name_ != "aten::_softmax" && name_ != "aten::_log_softmax") return;
    if (!(*stack_)[begin_ + 2].isBool() || !(*stack_)[begin_ + 2].toBool()) return;
    (*stack_)[begin_] = (*stack_)[begin_].toTensor().to(at::kFloat);
    (*stack_)[begin_ + 2] = false;
  }

  // What the kernel wrote into may have been resized
  void settle_what_was_written() {
    for (auto& [i, tensors] : as_given_) {
      const auto* alias = schema_.arguments()[i].alias_info();
      if (!alias || !alias->isWrite()) continue;
      const auto originals = given_[i].isTensor() ? std::vector<Tensor>{given_[i].toTensor()} : given_[i].toTensorVector();
      for (size_t k = 0; k < originals.size(); ++k) settle(originals[k], tensors[k]);
    }
  }

  void settle(const Tensor& ours, const Tensor& cpu) {
    if (!is_here(ours)) return;
    written_.push_back(ours);
    auto* impl = ours.unsafeGetTensorImpl();
    if (cpu.storage().data() != ours.storage().data()) impl->set_storage_keep_dtype(taken_over(cpu));
    if (cpu.sizes() != ours.sizes() || cpu.strides() != ours.strides() || cpu.storage_offset() != ours.storage_offset())
      impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }

  void outward() {
    const size_t many = schema_.returns().size(), begin = stack_->size() - many;
    for (size_t k = 0; k < many; ++k) {
      auto& value = (*stack_)[begin + k];
      const auto* alias = schema_.returns()[k].alias_info();
      if (alias && alias->isWrite()) {
        for (size_t i = 0; i < given_.size(); ++i) {
          const auto* given = schema_.arguments()[i].alias_info();
          if (given && given->isWrite() && given->beforeSets() == alias->beforeSets()) value = given_[i];
        }
      } else if (value.isTensor()) {
        value = outward(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<Tensor> made;
        for (const Tensor& each : value.toTensorList()) made.push_back(outward(each));
        value = IValue(c10::List<Tensor>(made));
      }
    }
  }

  Tensor outward(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    may_be(tensor.scalar_type());
    const auto it = ours_.find(tensor.storage().unsafeGetStorageImpl());
    auto made = on_device(it != ours_.end() ? it->second : taken_over(tensor), tensor);
    written_.push_back(made);
    return made;
  }
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) { Call(op, stack).run(); }

// ---- what has no such kernel
Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device>, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  const auto type = c10::dtype_or_default(dtype);
  may_be(type);
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(kKey), type, format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool> pin) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  const auto type = c10::dtype_or_default(dtype);
  may_be(type);
  return at::detail::empty_strided_generic(size, stride, &device_memory, c10::DispatchKeySet(kKey), type);
}

c10::Scalar item(const Tensor& tensor) {
  waits("item");
  Held held(lock);
  Launch("item").reads(tensor);
  order.host_learns(order.of(current_stream));
  at::AutoDispatchBelowADInplaceOrView below;
  return at::native::_local_scalar_dense_cpu(as_cpu(tensor));
}

void copied(const Tensor& to, const Tensor& from, bool non_blocking) {
  const bool out = is_here(from) && !is_here(to), in = is_here(to) && !is_here(from);
  const Tensor cpu_to = is_here(to) ? as_cpu(to) : to, cpu_from = is_here(from) ? as_cpu(from) : from;
  const Tensor& on_host = out ? cpu_to : cpu_from;
  const bool later = non_blocking && (out || in) && order.is_pinned(on_host.data_ptr());
  const std::string name = out ? "copy to the host" : in ? "copy to the device" : "copy";
  if (!later && (out || (in && !non_blocking))) waits(name);
  at::AutoDispatchBelowADInplaceOrView below;
  Held held(lock);
  Launch launch(name);
  launch.reads(from);
  launch.writes(to);
  if (out) counts["bytes to the host"] += from.nbytes();
  if (in) counts["bytes to the device"] += to.nbytes();
  if (!(out && later)) cpu_to.copy_(cpu_from);
  if (!later) {
    if (out || (in && !non_blocking)) order.host_learns(order.of(current_stream));
    return;
  }
  const auto* host = static_cast<const char*>(on_host.data_ptr());
  if (out) {  // until the host has waited, there is nothing of it
    if (to.is_contiguous()) std::memset(to.data_ptr(), 0x7f, to.nbytes());
    order.later({launch.access, host, to.nbytes(), 0, [cpu_to, kept = cpu_from.clone()] {
                   at::AutoDispatchBelowADInplaceOrView below;
                   cpu_to.copy_(kept);
                 }});
  } else if (from.is_non_overlapping_and_dense()) {
    order.later({launch.access, host, from.nbytes(), Order::sum(host, from.nbytes()), {}});
  }
}

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  if (self.numel()) copied(self, from.sizes() == self.sizes() ? from : from.expand(self.sizes()), non_blocking);
  return self;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  copied(to, from.sizes() == to.sizes() ? from : from.expand(to.sizes()), non_blocking);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  copied(to, from, false);
  return to;
}

Tensor& set_storage(Tensor& self, c10::Storage from) {
  const int64_t numbers = from.nbytes() / self.dtype().itemsize();
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(from));
  impl->set_sizes_and_strides(c10::IntArrayRef({numbers}), c10::IntArrayRef({1}), 0);
  return self;
}

Tensor& set_storage_at(Tensor& self, c10::Storage from, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(from));
  if (stride.data() && stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  return self;
}

Tensor& set_nothing(Tensor& self) { return at::native::set_tensor_(self, at::empty({0}, self.options())); }

void record_stream(Tensor& tensor, c10::Stream stream) {
  Held held(lock);
  order.recorded(tensor.storage().data(), stream.id());
}

}  // namespace
}  // namespace second_device

#include "hooks.h"

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&second_device::fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  using namespace second_device;
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", [](const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("_reshape_alias", [](const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", [](const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) -> const Tensor& {
    return at::native::resize_(self, size, format);
  });
  m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Tensor", [](Tensor& self, const Tensor& from) -> Tensor& { return at::native::set_tensor_(self, from); });
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("set_", set_nothing);
  m.impl("is_set_to", at::native::is_set_to);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("copy_", copy_);
  for (auto* whole : {"convolution", "scaled_dot_product_attention"})  // as one kernel, not taken apart
    m.impl(whole, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
