// "simccl", a process group backend for tensors of the simulated device. The messages go over gloo; how it fails is
// NCCL's way: nobody is told that a peer is gone. A collective without its peers never ends, so the device hangs, and the
// host only notices when it waits for the device. The backend's abort() ends that. Without it, the watchdog aborts the
// process in the end.
//
// Unlike with NCCL, the host waits in Work::wait() for results that do arrive, since the device has no queue of its own.
#include "simulated.h"

#include <ATen/ops/copy_native.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace simulated {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// What becomes of one process group's communicators. They hang together, and are aborted together.
class Health {
 public:
  ~Health() { abort(); }
  void hang() {
    std::lock_guard<std::mutex> guard(lock_);
    if (!hung_ && !aborted_) {
      hung_ = true;
      hangs_since_ = seconds_now();
      begin_hang();
    }
  }
  void abort() {
    std::lock_guard<std::mutex> guard(lock_);
    if (hung_ && !aborted_) {
      end_hang();
    }
    aborted_ = true;
  }
  bool is_aborted() const { return aborted_; }
  bool is_lost() const { return hung_ || aborted_; }
  bool hangs_for_longer_than(double seconds) const {
    return hung_ && !aborted_ && seconds_now() > hangs_since_ + seconds;
  }

 private:
  std::mutex lock_;
  std::atomic<bool> hung_{false}, aborted_{false};
  std::atomic<double> hangs_since_{0};
};

// ---------------------------------------------------------------- one collective

class SimulatedWork final : public c10d::Work {
 public:
  SimulatedWork(c10d::OpType type, Tensors results, std::shared_ptr<Health> health)
      : c10d::Work(-1, type), results_(std::move(results)), health_(std::move(health)) {
    std::vector<c10::Device> devices;
    if (!results_.empty()) {
      devices.push_back(results_[0].device());
    }
    auto type_of_value = c10::ListType::create(c10::TensorType::get());
    future_ = c10::make_intrusive<c10::ivalue::Future>(type_of_value, devices);
  }

  // The results are there.
  void arrive() {
    arrived_ = true;
    release_host();
  }
  // They never come: as with NCCL, the host goes on and does not know.
  void give_up() { release_host(); }
  bool is_settled() const { return settled_; }
  double issued_at() const { return issued_at_; }
  Health& health() const { return *health_; }

  bool isCompleted() override { return arrived_ || health_->is_aborted(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    future_->wait();
    if (opType_ == c10d::OpType::BARRIER) {
      host_waits("barrier");
    }
    return true;
  }
  void synchronize() override { wait(); }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  void release_host() {
    if (!settled_.exchange(true)) {
      future_->markCompleted(c10::IValue(results_));
    }
  }

  Tensors results_;
  std::shared_ptr<Health> health_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<bool> arrived_{false}, settled_{false};
  double issued_at_ = seconds_now();
};

// A thread of each process that finds out which collectives never end, and for how long the device hangs.
class Overseer {
 public:
  static Overseer& of_process() {
    static auto* overseer = new Overseer;  // lives as long as the process: its thread does
    return *overseer;
  }
  void add(const c10::intrusive_ptr<SimulatedWork>& work) {
    std::lock_guard<std::mutex> guard(lock_);
    running_.push_back(work);
    any_.notify_one();
  }
  void add(const std::shared_ptr<Health>& health) {
    std::lock_guard<std::mutex> guard(lock_);
    groups_.push_back(health);
  }

 private:
  Overseer() { std::thread([this] { oversee(); }).detach(); }

  [[noreturn]] void oversee() {
    while (true) {
      for (const auto& work : works()) {
        look_at(*work);
      }
      abort_if_hung_for_too_long();
      wait_for_more();
    }
  }
  static void look_at(SimulatedWork& work) {
    if (!work.is_settled() && seconds_now() > work.issued_at() + settings().stall) {
      work.health().hang();
    }
    if (work.health().is_lost()) {
      work.give_up();
    }
  }
  // Those that are not settled, and forgets the others.
  std::vector<c10::intrusive_ptr<SimulatedWork>> works() {
    std::lock_guard<std::mutex> guard(lock_);
    running_.remove_if([](const auto& work) { return work->is_settled(); });
    return {running_.begin(), running_.end()};
  }
  void wait_for_more() {
    std::unique_lock<std::mutex> guard(lock_);
    auto pause = std::chrono::milliseconds(running_.empty() ? 100 : 5);
    any_.wait_for(guard, pause);
  }
  void abort_if_hung_for_too_long() {
    std::lock_guard<std::mutex> guard(lock_);
    groups_.remove_if([](const auto& health) { return health.use_count() == 1; });
    for (const auto& health : groups_) {
      if (health->hangs_for_longer_than(settings().watchdog)) {
        std::fprintf(stderr, "simccl's watchdog: a collective has not ended in time; the process is aborted\n");
        std::fflush(stderr);
        std::abort();
      }
    }
  }

  std::mutex lock_;
  std::condition_variable any_;
  std::list<c10::intrusive_ptr<SimulatedWork>> running_;
  std::list<std::shared_ptr<Health>> groups_;
};

// ---------------------------------------------------------------- tensors

Tensors to_host(const Tensors& tensors) {
  Unwatched own;
  Tensors copies;
  for (const auto& each : tensors) {
    copies.push_back(as_cpu(each.detach()).clone());
  }
  return copies;
}

Tensors like_on_host(const Tensors& tensors) {
  Tensors fresh;
  for (const auto& each : tensors) {
    fresh.push_back(at::empty(each.sizes(), each.options().device(at::kCPU)));
  }
  return fresh;
}

void write(const Tensors& results, const Tensors& values) {
  Unwatched own;
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::InferenceMode no_inference(false);
  for (size_t at = 0; at < results.size(); ++at) {
    auto target = as_cpu(results[at]);
    at::native::copy_(target, values[at], false);
  }
}

// ---------------------------------------------------------------- communicators

// As with NCCL, a group has a communicator for each device that the process uses in it, made by the first collective on
// it, at the same time on all ranks. Which ranks' communicators find each other depends on that order alone.
class Communicators {
 public:
  using Inner = c10::intrusive_ptr<c10d::Backend>;

  Communicators(std::vector<Inner> inner, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Health> health)
      : inner_(std::move(inner)), store_(std::move(store)), health_(std::move(health)) {}

  Inner on(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = number_of_.find(device);
    if (found == number_of_.end()) {
      auto number = number_of_.size();
      TORCH_CHECK(number < inner_.size(), "simccl has ", inner_.size(), " communicators for each process group");
      found = number_of_.emplace(device, number).first;
      check_that_devices_differ(number, device);
    }
    return inner_[found->second];
  }
  std::optional<c10::DeviceIndex> first_used() {
    std::lock_guard<std::mutex> guard(lock_);
    for (auto [device, number] : number_of_) {
      if (number == 0) {
        return device;
      }
    }
    return std::nullopt;
  }

 private:
  // Each rank tells its device before it asks for those of others, so none waits in a circle. If some never make this
  // communicator, nothing is found out here, and the collective hangs.
  void check_that_devices_differ(size_t number, c10::DeviceIndex device) {
    store_->set(key(number, rank()), std::to_string(device));
    if (!all_have_told(number)) {
      return;
    }
    std::map<std::string, int> owners;
    for (int other = 0; other < inner_[0]->getSize(); ++other) {
      auto [owner, is_first] = owners.emplace(store_->get_to_str(key(number, other)), other);
      TORCH_CHECK(is_first, "Duplicate GPU detected : rank ", owner->second, " and rank ", other, " both on device sim:",
                  owner->first);
    }
  }
  bool all_have_told(size_t number) {
    std::vector<std::string> keys;
    for (int other = 0; other < inner_[0]->getSize(); ++other) {
      keys.push_back(key(number, other));
    }
    double deadline = seconds_now() + settings().stall;
    while (!store_->check(keys)) {
      if (health_->is_lost() || seconds_now() > deadline) {
        return false;
      }
      sleep(0.002);
    }
    return true;
  }
  int rank() const { return inner_[0]->getRank(); }
  static std::string key(size_t number, int rank) {
    return "device of rank " + std::to_string(rank) + " in communicator " + std::to_string(number);
  }

  std::vector<Inner> inner_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<Health> health_;
  std::mutex lock_;
  std::map<c10::DeviceIndex, size_t> number_of_;
};

// ---------------------------------------------------------------- the backend

class SimulatedBackend final : public c10d::Backend {
 public:
  using Inner = Communicators::Inner;

  SimulatedBackend(const std::vector<Inner>& inner, const c10::intrusive_ptr<c10d::Store>& store, double timeout)
      : c10d::Backend(inner.at(0)->getRank(), inner[0]->getSize()),
        communicators_(inner, store, health_),
        options_(c10::make_intrusive<Options>(getBackendName(), milliseconds(timeout))) {
    Overseer::of_process().add(health_);
  }

  const std::string getBackendName() const override { return "simccl"; }
  // Without "override": torch 2.8 has no such method in the base class.
  c10::intrusive_ptr<Options> getBackendOptions() { return options_; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return issued_; }
  void abort() override { health_->abort(); }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto on = communicator(tensors);
    auto values = std::make_shared<Tensors>(to_host(tensors));
    auto inner_options = options;
    inner_options.reduceOp = prepared(options.reduceOp, *values);
    return run(c10d::OpType::ALLREDUCE, tensors, *values, [=] { return on->allreduce(*values, inner_options); });
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto on = communicator(tensors);
    auto values = std::make_shared<Tensors>(to_host(tensors));
    auto inner_options = options;
    inner_options.reduceOp = prepared(options.reduceOp, *values);
    return run(c10d::OpType::ALLREDUCE_COALESCED, tensors, *values,
               [=] { return on->allreduce_coalesced(*values, inner_options); });
  }
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto on = communicator(tensors);
    auto values = std::make_shared<Tensors>(to_host(tensors));
    return run(c10d::OpType::BROADCAST, tensors, *values, [=] { return on->broadcast(*values, options); });
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto on = communicator(tensors);
    auto values = std::make_shared<Tensors>(to_host(tensors));
    auto inner_options = options;
    inner_options.reduceOp = prepared(options.reduceOp, *values);
    auto results = getRank() == options.rootRank ? tensors : Tensors();
    return run(c10d::OpType::REDUCE, results, *values, [=] { return on->reduce(*values, inner_options); });
  }
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto on = communicator(inputs);
    auto sent = std::make_shared<Tensors>(to_host(inputs));
    auto lists = std::make_shared<std::vector<Tensors>>();
    Tensors results, values;
    for (const auto& list : outputs) {
      lists->push_back(like_on_host(list));
      results.insert(results.end(), list.begin(), list.end());
      values.insert(values.end(), lists->back().begin(), lists->back().end());
    }
    return run(c10d::OpType::ALLGATHER, results, values, [=] { return on->allgather(*lists, *sent, options); });
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto on = communicator({output, input});
    auto sent = std::make_shared<Tensors>(to_host({input}));
    auto value = like_on_host({output})[0];
    // gloo's own compares shapes, and NCCL only sizes.
    auto parts = std::make_shared<std::vector<Tensors>>(1);
    for (const auto& part : value.view(-1).chunk(getSize())) {
      (*parts)[0].push_back(part.view(input.sizes()));
    }
    return run(c10d::OpType::_ALLGATHER_BASE, {output}, {value}, [=] { return on->allgather(*parts, *sent, options); });
  }
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(outputs.size() == 1, "simccl gathers one tensor at a time");
    return _allgather_base(outputs[0], inputs[0], options);
  }
  // gloo's own does not know all operations: all are reduced, and this rank's part is kept.
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override {
    auto on = communicator({output, input});
    auto values = std::make_shared<Tensors>(to_host({input}));
    c10d::AllreduceOptions inner_options;
    inner_options.timeout = options.timeout;
    inner_options.reduceOp = prepared(options.reduceOp, *values);
    auto mine = (*values)[0].view(-1).narrow(0, getRank() * output.numel(), output.numel()).view(output.sizes());
    return run(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, {mine},
               [=] { return on->allreduce(*values, inner_options); });
  }
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(outputs.size() == 1, "simccl reduces one tensor at a time");
    return _reduce_scatter_base(outputs[0], inputs[0], options);
  }
  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    check_not_aborted();
    auto on = communicators_.on(device_of_barrier(options));
    auto values = std::make_shared<Tensors>(Tensors{at::zeros({1}, at::kCPU)});
    return run(c10d::OpType::BARRIER, {}, {}, [=] { return on->allreduce(*values, c10d::AllreduceOptions()); });
  }

 private:
  static std::chrono::milliseconds milliseconds(double seconds) {
    return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
  }

  Inner communicator(const Tensors& tensors) {
    check_not_aborted();
    for (const auto& each : tensors) {
      TORCH_CHECK(each.device().type() == kDevice, "simccl: tensors must be on sim, and not on ", each.device());
      TORCH_CHECK(each.is_contiguous(), "simccl: tensors must be contiguous");
    }
    return communicators_.on(tensors.at(0).device().index());
  }
  void check_not_aborted() const {
    TORCH_CHECK_WITH(DistBackendError, !health_->is_aborted(), "simccl: the communicators of rank ", getRank(),
                     " were aborted");
  }
  c10::DeviceIndex device_of_barrier(const c10d::BarrierOptions& options) {
    if (options.device && options.device->has_index()) {
      return options.device->index();
    }
    if (!options.device_ids.empty()) {
      return static_cast<c10::DeviceIndex>(options.device_ids[0]);
    }
    if (auto bound = getBoundDeviceId()) {
      return bound->index();
    }
    return communicators_.first_used().value_or(current_device());
  }

  // gloo has no mean: each rank gives its share of it to a sum.
  c10d::ReduceOp prepared(const c10d::ReduceOp& operation, Tensors& values) const {
    TORCH_CHECK(operation != c10d::ReduceOp::PREMUL_SUM, "simccl can't multiply before it sums");
    if (operation != c10d::ReduceOp::AVG) {
      return operation;
    }
    for (auto& each : values) {
      each.div_(getSize());
    }
    return c10d::ReduceOp::SUM;
  }

  // Starts a collective over gloo, and writes `values` to `results` when it is done.
  WorkPointer run(c10d::OpType type, const Tensors& results, const Tensors& values,
                  const std::function<WorkPointer()>& start) {
    ++issued_;
    auto work = c10::make_intrusive<SimulatedWork>(type, results, health_);
    if (health_->is_lost()) {
      work->give_up();
      return work;
    }
    auto inner = start();  // raises if it does not take such tensors
    Overseer::of_process().add(work);
    inner->getFuture()->addCallback([work, results, values](c10::ivalue::Future& done) {
      if (done.hasError()) {
        work->health().hang();
        work->give_up();
        return;
      }
      sleep(settings().delay);
      write(results, values);
      work->arrive();
    });
    return work;
  }

  std::shared_ptr<Health> health_ = std::make_shared<Health>();
  Communicators communicators_;
  c10::intrusive_ptr<Options> options_;
  std::atomic<uint64_t> issued_{0};
};

}  // namespace

void bind_backend(py::module_& module) {
  py::module_::import("torch.distributed");  // knows the base class
  using Pointer = c10::intrusive_ptr<SimulatedBackend>;
  using Inner = std::vector<SimulatedBackend::Inner>;
  py::class_<SimulatedBackend, Pointer, c10d::Backend>(module, "SimulatedBackend")
      .def(py::init<Inner, c10::intrusive_ptr<c10d::Store>, double>(), py::call_guard<py::gil_scoped_release>());
}

}  // namespace simulated
