// What PyTorch asks the device for: streams, events, generators, and, from Python, the figures.
#pragma once

namespace second_device {
namespace {

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex = -1) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex = -1) const override { return at::make_generator<Generator>(0); }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* at) const override {
    Held held(lock);
    return order.is_pinned(at);
  }
  void deviceSynchronize(c10::DeviceIndex) const override {
    Held held(lock);
    order.host_learns_all();
  }
};

struct Event {
  Clock clock;
  double milliseconds = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream numbered(int64_t number) { return c10::Stream(c10::Stream::UNSAFE, kDevice, number); }

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device) const noexcept override { return numbered(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return numbered(0); }
  c10::Stream getNewStream(c10::Device, int = 0) const override {
    Held held(lock);
    return numbered(next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return numbered(std::exchange(current_stream, stream.id()));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    waits("stream");
    Held held(lock);
    order.host_learns(order.of(stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    waits("device");
    Held held(lock);
    order.host_learns_all();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Held held(lock);
    order.recorded(data.get(), stream.id());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Held held(lock);
    if (!*event) *event = new Event;
    order.launch(stream.id());
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    *static_cast<Event*>(*event) = {order.of(stream.id()), std::chrono::duration<double, std::milli>(now).count()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    Held held(lock);
    if (event) learn(order.of(stream.id()), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    Held held(lock);
    if (event) order.host_learns(static_cast<Event*>(event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    waits("event");
    queryEvent(event);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return static_cast<Event*>(second)->milliseconds - static_cast<Event*>(first)->milliseconds;
  }
};

// An operation for which the CPU has a kernel of its own shall not be taken apart by a composite one here.
void take_the_cpus_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten", std::make_optional(kKey), __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace().value_or("") != "aten") continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (op->hasKernelForDispatchKey(kKey)) continue;
    const auto own = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(own.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace
}  // namespace second_device

C10_REGISTER_GUARD_IMPL(CUDA, second_device::Guard);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace second_device;
  c10::SetAllocator(kType, &device_memory);
  // The CPU wheel made its hooks, without CUDA, as it was imported
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;
  take_the_cpus_kernels();

  m.def("counts", [] { Held held(lock); return counts; });
  m.def("kernels_by_op", [] { Held held(lock); return kernels_by_op; });
  m.def("hazards", [] { Held held(lock); return order.hazards; });
  m.def("reset", [] {
    Held held(lock);
    counts.clear();
    kernels_by_op.clear();
    order.hazards.clear();
    most_used = all_used();
  });
  m.def("blocks", [] { return order.blocks.size(); });
  m.def("used", all_used);
  m.def("most_used", [] { return most_used; });
  m.def("reset_most_used", [] { most_used = all_used(); });
  m.def("total", [] { return total; });
  m.def("set_total", [](size_t bytes) { total = bytes; });
  m.def("fail_in", [](int64_t allocations) { fails_in = allocations; });
  m.def("set_capability", [](int number) { capability = number; });
  m.def("set_has_float64", [](bool has) { has_float64 = has; });
  m.def("set_without_kernel", [](Names names) { without_kernel = std::move(names); });
  m.def("set_capturing", [](bool on) { capturing = on; });
  m.def("set_on_wait", [](py::object call) {
    delete on_wait;
    on_wait = call.is_none() ? nullptr : new py::object(call);
  });
  m.def("random_state", [] { return default_generator().get_state(); });
  m.def("set_random_state", [](const Tensor& state) { at::Generator(default_generator()).set_state(state); });
  m.def("seed", [](uint64_t seed) { at::Generator(default_generator()).set_current_seed(seed); });
  m.def("pin", [](size_t at, size_t bytes) { Held held(lock); order.pinned[reinterpret_cast<char*>(at)] = bytes; });
  m.def("set_error", [](std::string text) { error = std::move(text); });
  m.def("unpin", [](size_t at) { Held held(lock); return order.unpin(reinterpret_cast<char*>(at)); });
}
