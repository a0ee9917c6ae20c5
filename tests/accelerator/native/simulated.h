// The simulated accelerator: what its device (device.cpp) and its process group backend (backend.cpp) share.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>

namespace simulated {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// Each may change while ranks run.
struct Settings {
  std::atomic<int> devices{4};
  std::atomic<double> delay{0};  // seconds by which results of collectives come late
  std::atomic<double> stall{30};  // seconds after which a collective without its peers counts as one that never ends
  std::atomic<double> watchdog{30};  // seconds for which the device may hang before the process is aborted
};
Settings& settings();

double seconds_now();

// Inside such a scope the simulator works for itself: nothing counts as the host waiting for the device.
class Unwatched {
 public:
  Unwatched();
  ~Unwatched();
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
};

// Called wherever a host would wait until the device is done: tells the recorder, and blocks while the device hangs.
void host_waits(const char* what);

// A device hangs while a collective on it never ends. Each communicator that has one says so, and takes it back.
void begin_hang();
void end_hang();
bool device_hangs();

c10::DeviceIndex current_device();

// The same memory as a CPU tensor, which keeps it alive.
at::Tensor as_cpu(const at::Tensor& tensor);

void bind_device(py::module_& module);
void bind_backend(py::module_& module);

}  // namespace simulated
