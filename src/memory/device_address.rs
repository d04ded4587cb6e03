//! Addresses of device memory, for kernels.

/// An address inside device memory. One can be made of a region only, or with the promise that `new` asks for: a kernel
/// that is launched over it finds memory of its device there, of which it uses no more than its launch says. The memory has
/// to stay until the stream is past the launch; regions see to that, for their arena waits for the device before it goes.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceAddress(u64);

impl DeviceAddress {
    /// Where no memory is: for arguments that a kernel takes as "none".
    pub const NULL: DeviceAddress = DeviceAddress(0);

    /// # Safety
    /// Until every stream is past the launches that use it, the address lies in memory of the device, or one past its end,
    /// and what launches say they use from there on is memory too.
    #[expect(
        unsafe_code,
        reason = "kernels are launched over it by functions that are not unsafe"
    )]
    pub const unsafe fn new(address: u64) -> DeviceAddress {
        DeviceAddress(address)
    }

    /// Of a region, which has made sure of it.
    pub(super) fn inside(address: u64) -> DeviceAddress {
        DeviceAddress(address)
    }

    /// As a number: for tables that kernels read addresses from, and for checks of alignment.
    pub fn value(self) -> u64 {
        self.0
    }

    /// The address so many bytes further on, inside the same buffer.
    ///
    /// # Panics
    /// When there is none.
    pub fn after(self, bytes: u64) -> DeviceAddress {
        let address = self.0.checked_add(bytes);
        DeviceAddress(address.unwrap_or_else(|| panic!("{bytes} bytes after {self:?}")))
    }
}
