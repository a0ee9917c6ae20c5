// A device without hardware: its memory is the host's, its operators are the CPU's and are done at once. What is like an
// accelerator: tensors have a device of their own, of which there are several; autograd runs in threads of their own;
// fresh memory holds rubbish; and reading a value is an event, at which the host would wait.
#include "simulated.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

namespace simulated {

Settings& settings() {
  static Settings all;
  return all;
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---------------------------------------------------------------- waiting

namespace {

thread_local int unwatched_scopes = 0;
std::atomic<int> hangs{0};
py::object* recorder = nullptr;  // a function of what was waited for; guarded by the GIL

void tell_recorder(const char* what) {
  if (!Py_IsInitialized()) {
    return;
  }
  py::gil_scoped_acquire gil;
  if (recorder) {
    (*recorder)(what);
  }
}

void sleep_while_device_hangs() {
  while (device_hangs()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace

Unwatched::Unwatched() { ++unwatched_scopes; }
Unwatched::~Unwatched() { --unwatched_scopes; }

void begin_hang() { ++hangs; }
void end_hang() { --hangs; }
bool device_hangs() { return hangs > 0; }

void host_waits(const char* what) {
  if (unwatched_scopes) {
    return;
  }
  tell_recorder(what);
  // Other threads of the process go on while this one waits, as they do where torch waits for a real device.
  if (Py_IsInitialized() && PyGILState_Check()) {
    py::gil_scoped_release others_run;
    sleep_while_device_hangs();
  } else {
    sleep_while_device_hangs();
  }
}

// ---------------------------------------------------------------- memory

namespace {

constexpr int kMostDevices = 64;
constexpr size_t kAlignment = 64;
thread_local c10::DeviceIndex device_of_thread = 0;

struct Held {
  std::atomic<int64_t> now{0}, peak{0};

  void add(int64_t bytes) {
    int64_t total = now += bytes;
    int64_t most = peak;
    while (total > most && !peak.compare_exchange_weak(most, total)) {
    }
  }
};
std::array<Held, kMostDevices> held;

struct Block {
  void* data;
  int64_t bytes;
  c10::DeviceIndex device;
};

void* aligned(size_t bytes) {
  void* data = nullptr;
  if (posix_memalign(&data, kAlignment, std::max<size_t>(bytes, 1))) {
    throw std::bad_alloc();
  }
  return data;
}

void free_block(void* pointer) {
  std::unique_ptr<Block> block(static_cast<Block*>(pointer));
  held[block->device].add(-block->bytes);
  std::free(block->data);
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? aligned(bytes) : nullptr;
    if (bytes) {
      std::memset(data, 0x7f, bytes);  // rubbish: who relies on zeros is found out
    }
    auto* block = new Block{data, static_cast<int64_t>(bytes), device_of_thread};
    held[block->device].add(block->bytes);
    return {data, block, &free_block, c10::Device(kDevice, block->device)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
DeviceMemory device_memory;

// Memory of the host that a device could copy from and to while the host goes on: here only its addresses are known.
struct PinnedMemory final : c10::Allocator {
  std::mutex lock;
  std::set<const void*> all;

  static void release(void* data);
  c10::DataPtr allocate(size_t bytes) override {
    void* data = aligned(bytes);
    std::lock_guard<std::mutex> guard(lock);
    all.insert(data);
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  bool has(const void* data) {
    std::lock_guard<std::mutex> guard(lock);
    return all.count(data) > 0;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedMemory pinned_memory;

void PinnedMemory::release(void* data) {
  {
    std::lock_guard<std::mutex> guard(pinned_memory.lock);
    pinned_memory.all.erase(data);
  }
  std::free(data);
}

// ---------------------------------------------------------------- devices and streams

// Streams are names: all work is done when it is issued, so that there is nothing to order.
thread_local std::map<c10::DeviceIndex, c10::StreamId> stream_of_thread;
std::atomic<c10::StreamId> next_stream{1};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(settings().devices);
  }
  c10::Device getDevice() const override { return {kDevice, device_of_thread}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < deviceCount(), "there is no device sim:", static_cast<int>(device.index()));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_of_thread = index_of(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream(device, stream_of_thread[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device, next_stream++); }
  c10::Stream exchangeStream(c10::Stream fresh) const override {
    auto old = getStream(fresh.device());
    stream_of_thread[fresh.device_index()] = fresh.id();
    return old;
  }
  bool queryStream(const c10::Stream&) const override { return !device_hangs(); }
  void synchronizeStream(const c10::Stream&) const override { host_waits("Stream.synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { host_waits("synchronize"); }

  // torch takes an event that is not null for one that was recorded.
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) {
      *event = new char;
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<char*>(event); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return !device_hangs(); }
  void synchronizeEvent(void*) const override { host_waits("Event.synchronize"); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }

 private:
  static c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : device_of_thread; }
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, {kDevice, index_of(device)}, id);
  }
};

// Gives a storage `bytes` of memory, and what fits of the old.
void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* old = storage.unsafeGetStorageImpl();
  c10::DeviceGuard guard(old->device());
  auto fresh = device_memory.allocate(bytes);
  if (auto kept = std::min(bytes, old->nbytes())) {
    std::memcpy(fresh.mutable_get(), old->data(), kept);
  }
  old->set_data_ptr_noswap(std::move(fresh));
  old->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kDevice, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return device_of_thread; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kDevice, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override { return pinned_memory.has(data); }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, device_of_thread}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

// DDP asks for one, and else warns on every rank that it can't measure times.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};

// ---------------------------------------------------------------- operators

using Sizes = c10::IntArrayRef;
using SymSizes = c10::SymIntArrayRef;

at::Tensor empty(Sizes size, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kDevice)));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(Sizes size, Sizes stride, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kDevice)));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(type));
}

at::Tensor as_strided(const at::Tensor& self, SymSizes size, SymSizes stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, SymSizes size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, SymSizes size, SymSizes stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(const at::Tensor& self, SymSizes size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }

at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }

at::Tensor& set_view(at::Tensor& self, at::Storage source, int64_t offset, Sizes size, Sizes stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

// As with CUDA: the host waits for each copy from or to its memory, unless it said that it would not. It can't keep that
// for a copy into memory that is not pinned.
void wait_for_copy(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.is_cpu() && !(non_blocking && pinned_memory.has(to.storage().data()))) {
    host_waits("copy to the host");
  } else if (from.is_cpu() && !non_blocking) {
    host_waits("copy from the host");
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel()) {
    wait_for_copy(from, to, non_blocking);
    Unwatched own;
    auto target = as_cpu(to);
    at::native::copy_(target, as_cpu(from), false);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  host_waits("item");
  return at::native::_local_scalar_dense_cpu(as_cpu(self));
}

// Memory is freed when it is no longer held, by whatever stream it was used.
void record_stream(at::Tensor&, at::Stream) {}

using Arguments = c10::ArrayRef<c10::IValue>;

bool is_mask(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) {
    return false;
  }
  auto type = value.toTensor().scalar_type();
  return type == at::kBool || type == at::kByte;
}

bool indexes_by_mask(const std::string& name, Arguments arguments) {
  if (name != "aten::index" && name != "aten::index_put_" && name != "aten::_index_put_impl_") {
    return false;
  }
  for (const c10::IValue& each : arguments[1].toListRef()) {
    if (is_mask(each)) {
      return true;
    }
  }
  return false;
}

// Operators whose result has a size or a value that only the device knows.
bool needs_host(const std::string& name, Arguments arguments) {
  static const std::set<std::string> names = {
      "aten::equal",      "aten::nonzero",           "aten::masked_select", "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave"};
  return names.count(name) || indexes_by_mask(name, arguments);
}

std::optional<c10::Device> device_among(Arguments arguments) {
  for (const auto& each : arguments) {
    std::vector<at::Tensor> tensors;
    if (each.isTensor()) {
      tensors.push_back(each.toTensor());
    } else if (each.isTensorList()) {
      tensors = each.toTensorVector();
    }
    for (const auto& tensor : tensors) {
      if (tensor.defined() && !tensor.is_cpu()) {
        return tensor.device();
      }
    }
  }
  return std::nullopt;
}

// batch_norm writes to its running statistics, which its schema does not tell: a copy of them would be changed.
void share_running_statistics(const std::string& name, torch::jit::Stack* stack, size_t first) {
  if (name != "aten::native_batch_norm") {
    return;
  }
  for (size_t at : {first + 3, first + 4}) {
    auto& value = (*stack)[at];
    if (value.isTensor() && value.toTensor().defined()) {
      value = as_cpu(value.toTensor());
    }
  }
}

void run_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& name = operation.schema().name();
  auto count = operation.schema().arguments().size();
  auto arguments = torch::jit::last(*stack, count);
  if (needs_host(name, arguments)) {
    host_waits(name.c_str());
  }
  Unwatched own;
  c10::OptionalDeviceGuard guard;
  if (auto device = device_among(arguments)) {
    guard.reset_device(*device);
  }
  share_running_statistics(name, stack, stack->size() - count);
  at::native::cpu_fallback(operation, stack);
}

}  // namespace

c10::DeviceIndex current_device() { return device_of_thread; }

at::Tensor as_cpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) {
    return tensor;
  }
  at::Tensor kept = tensor;
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  auto release = [kept](void*) mutable { kept.reset(); };
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), release, options);
}

namespace {

int checked(int device) {
  TORCH_CHECK(device >= 0 && device < settings().devices, "there is no device sim:", device);
  return device;
}

}  // namespace

void bind_device(py::module_& module) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("configure", [](int devices, double delay, double stall, double watchdog) {
    TORCH_CHECK(devices > 0 && devices <= kMostDevices, "devices=", devices, " and not 1 to ", kMostDevices);
    settings().devices = devices;
    settings().delay = delay;
    settings().stall = stall;
    settings().watchdog = watchdog;
  });
  module.def("device_count", [] { return settings().devices.load(); });
  module.def("current_device", [] { return static_cast<int>(device_of_thread); });
  module.def("set_device", [](int device) { device_of_thread = static_cast<c10::DeviceIndex>(checked(device)); });
  module.def("hangs", &device_hangs);
  module.def("memory_held", [](int device) { return held[checked(device)].now.load(); });
  module.def("peak_memory", [](int device) { return held[checked(device)].peak.load(); });
  module.def("reset_peak", [](int device) { held[checked(device)].peak = held[device].now.load(); });
  module.def("record_waits", [](const py::object& function) {
    delete recorder;
    recorder = function.is_none() ? nullptr : new py::object(function);
  });
}

}  // namespace simulated

// torch registers such things by macros, which need the types' names without a namespace before them.
using SimulatedGuard = simulated::Guard;
using SimulatedTimer = simulated::Timer;

C10_REGISTER_GUARD_IMPL(PrivateUse1, SimulatedGuard)
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &simulated::device_memory)
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kPrivateUse1, SimulatedTimer)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", simulated::empty);
  library.impl("empty_strided", simulated::empty_strided);
  library.impl("as_strided", simulated::as_strided);
  library.impl("view", simulated::view);
  library.impl("_reshape_alias", simulated::reshape_alias);
  library.impl("resize_", simulated::resize);
  library.impl("set_.source_Tensor", simulated::set_tensor);
  library.impl("set_.source_Storage", simulated::set_storage);
  library.impl("set_.source_Storage_storage_offset", simulated::set_view);
  library.impl("_copy_from", simulated::copy_from);
  library.impl("_copy_from_and_resize", simulated::copy_from_and_resize);
  library.impl("record_stream", simulated::record_stream);
  library.impl("_local_scalar_dense", simulated::local_scalar);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated::run_on_cpu>());
}

// autocast casts the arguments of these; all others take what they get.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  simulated::bind_device(module);
  simulated::bind_backend(module);
}
