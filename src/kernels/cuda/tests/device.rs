//! The device of the tests: buffers in its memory, and what they hold.

use std::env;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr, sys};

use crate::kernels::cuda::{CudaKernels, DeviceAddress};

/// A device with the kernels loaded, and the stream that all tests of it use.
pub(super) struct Device {
    pub(super) stream: Arc<CudaStream>,
    pub(super) kernels: CudaKernels,
}

/// The first device; `None` where there is no driver, or it has no device.
pub(super) fn device() -> Option<Device> {
    // SAFETY: loads the driver's library, if there is one, and lets it go.
    let has_driver = unsafe { sys::is_culib_present() };
    let context = match has_driver {
        true => CudaContext::new(0).map_err(|error| error.to_string()),
        false => Err("libcuda.so.1 is not found".to_owned()),
    };
    match context {
        Ok(context) => {
            let kernels = CudaKernels::load(&context).expect("kernels load");
            let stream = context.new_stream().expect("a stream");
            Some(Device { stream, kernels })
        }
        Err(why) => {
            let is_required = env::var("STRATA_REQUIRE_GPU").is_ok_and(|value| value == "1");
            assert!(!is_required, "no CUDA device: {why}");
            eprintln!("skipped: no CUDA device ({why})");
            None
        }
    }
}

/// Device memory with a known content.
pub(super) struct Buffer {
    bytes: CudaSlice<u8>,
    stream: Arc<CudaStream>,
}

impl Device {
    /// A copy of `values`.
    pub(super) fn upload<T: Plain>(&self, values: &[T]) -> Buffer {
        self.upload_at(0, values)
    }

    /// A copy of `values` that starts `offset` bytes into the buffer.
    pub(super) fn upload_at<T: Plain>(&self, offset: usize, values: &[T]) -> Buffer {
        let mut bytes = vec![0; offset];
        bytes.extend(values.iter().flat_map(T::bytes));
        // The driver gives no empty allocations.
        bytes.resize(bytes.len().max(1), 0);
        Buffer {
            bytes: self
                .stream
                .clone_htod(&bytes)
                .expect("a copy to the device"),
            stream: self.stream.clone(),
        }
    }

    /// `count` floats that are not to be left as they are.
    pub(super) fn unwritten(&self, count: usize) -> Buffer {
        self.upload(&vec![UNWRITTEN; count])
    }
}

/// What buffers hold where nothing was written.
pub(super) const UNWRITTEN: f32 = -12345.5;

impl Buffer {
    pub(super) fn address(&self) -> DeviceAddress {
        let (address, _) = self.bytes.device_ptr(&self.stream);
        // SAFETY: the buffer is the context's, and as long as its maker said; it is read before it goes.
        unsafe { DeviceAddress::new(address) }
    }

    pub(super) fn read<T: Plain>(&self) -> Vec<T> {
        let bytes = self
            .stream
            .clone_dtoh(&self.bytes)
            .expect("a copy from the device");
        self.stream.synchronize().expect("the kernels run");
        bytes
            .chunks_exact(size_of::<T>())
            .map(T::from_bytes)
            .collect()
    }

    pub(super) fn floats(&self) -> Vec<f32> {
        self.read()
    }
}

/// Elements of buffers.
pub(super) trait Plain: DeviceRepr + Copy {
    fn bytes(&self) -> Vec<u8>;
    fn from_bytes(bytes: &[u8]) -> Self;
}

macro_rules! plain {
    ($($name:ty)*) => {
        $(impl Plain for $name {
            fn bytes(&self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
            fn from_bytes(bytes: &[u8]) -> $name {
                <$name>::from_le_bytes(bytes.try_into().expect("bytes of one element"))
            }
        })*
    };
}
plain!(u8 u16 u32 u64 f32);
