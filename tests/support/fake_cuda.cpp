// A CUDA without a device. FakeTensorMode computes shapes of tensors "on cuda:0" on any machine, but indexing,
// autograd and streams ask a build of torch without CUDA for its device. What is here answers, and does nothing.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
struct NoDevice : public CUDAHooksInterface {
  explicit NoDevice(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};
// torch finds its hooks under this name.
using CUDAHooks = NoDevice;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

namespace {
using c10::Device, c10::DeviceIndex, c10::Stream;
const Device only(c10::DeviceType::CUDA, 0);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  Device getDevice() const override { return only; }
  Device exchangeDevice(Device) const override { return only; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, only); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, only); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, only); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
Guard guard;
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
}  // namespace
