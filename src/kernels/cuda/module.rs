//! Modules of PTX, their functions, and the launch. The driver's handles stay inside.

use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result, sys};

use super::{DeviceAddress, KernelError};
use crate::memory::in_words;

/// PTX of a `.cu` file with its name: `source!("rows")`.
macro_rules! source {
    ($name:literal) => {
        $crate::kernels::cuda::module::Source {
            name: $name,
            // The driver wants a C string.
            #[cfg(feature = "cuda")]
            text: concat!(
                include_str!(concat!(env!("OUT_DIR"), "/", $name, ".ptx")),
                "\0"
            ),
            #[cfg(not(feature = "cuda"))]
            text: "\0",
        }
    };
}
pub(super) use source;

/// What `build.rs` made of a `.cu` file.
pub(super) struct Source {
    pub(super) name: &'static str,
    /// Ends with a NUL.
    pub(super) text: &'static str,
}

/// A module in the driver.
pub(super) struct Module {
    handle: sys::CUmodule,
    context: Arc<CudaContext>,
}

// SAFETY: the driver's handles may be used on any thread on which the context is current; each use makes it current.
unsafe impl Send for Module {}
// SAFETY: the driver takes calls of several threads at once, and nothing here changes.
unsafe impl Sync for Module {}

impl Module {
    pub(super) fn load(
        context: &Arc<CudaContext>,
        source: &Source,
    ) -> Result<Arc<Module>, KernelError> {
        let refused = |error| KernelError::Load {
            module: source.name,
            why: in_words(error),
        };
        assert!(source.text.ends_with('\0'), "PTX of {}", source.name);
        context.bind_to_thread().map_err(refused)?;
        // SAFETY: the text ends with a NUL and is the driver's to read during the call only.
        let handle = unsafe { result::module::load_data(source.text.as_ptr().cast()) };
        Ok(Arc::new(Module {
            handle: handle.map_err(refused)?,
            context: context.clone(),
        }))
    }

    pub(super) fn kernel(self: &Arc<Module>, name: String) -> Result<Kernel, KernelError> {
        let found = CString::new(name.as_str())
            .map_err(|_| sys::CUresult::CUDA_ERROR_INVALID_VALUE)
            .and_then(|symbol| {
                // SAFETY: the handle is that of a loaded module.
                unsafe { result::module::get_function(self.handle, symbol) }
                    .map_err(|error| error.0)
            });
        match found {
            Ok(function) => Ok(Kernel {
                function,
                name,
                module: self.clone(),
            }),
            Err(code) => Err(KernelError::Find {
                kernel: name,
                why: in_words(result::DriverError(code)),
            }),
        }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // A context that failed takes its modules with it: there is nothing to do about an error here.
        let _ = self.context.bind_to_thread();
        // SAFETY: kernels hold a reference to their module, so none is left, and the driver finishes what is queued.
        let _ = unsafe { result::module::unload(self.handle) };
    }
}

/// A function of a module.
pub(super) struct Kernel {
    function: sys::CUfunction,
    name: String,
    module: Arc<Module>,
}

// SAFETY: as for `Module`.
unsafe impl Send for Kernel {}
// SAFETY: as for `Module`; a launch names its stream, and the driver takes launches from several threads.
unsafe impl Sync for Kernel {}

/// How many blocks, and threads in each of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) x: u32,
    pub(super) y: u32,
    pub(super) z: u32,
    pub(super) threads: u32,
}

/// The driver's limit of blocks along y and z.
const SHORT_AXIS_MAX: u32 = 65_535;

impl Grid {
    /// Threads of a block where each has one element.
    const ELEMENT_THREADS: u32 = 256;

    /// A thread for each element of `rows` rows.
    pub(super) fn of_elements(elements: u64, rows: u32) -> Grid {
        let blocks = elements.div_ceil(u64::from(Grid::ELEMENT_THREADS));
        Grid {
            x: u32::try_from(blocks)
                .unwrap_or_else(|_| panic!("{elements} elements in one launch")),
            y: rows,
            z: 1,
            threads: Grid::ELEMENT_THREADS,
        }
    }
}

/// What kernels take by value, laid out as the kernel's source declares it.
///
/// # Safety
/// `repr(C)` or a primitive, of the size and alignment of the type that it stands for in the `.cu` file.
pub(super) unsafe trait Argument {}

// SAFETY: primitives, `uint32_t`, `uint64_t` and `float` of the kernels.
unsafe impl Argument for u32 {}
// SAFETY: as above.
unsafe impl Argument for u64 {}
// SAFETY: as above.
unsafe impl Argument for f32 {}
// SAFETY: a transparent u64; the kernels' pointers.
unsafe impl Argument for DeviceAddress {}

/// Where the driver finds an argument while it copies them.
pub(super) fn argument<T: Argument>(value: &T) -> *mut c_void {
    ptr::from_ref(value).cast_mut().cast()
}

impl Kernel {
    /// Queues the kernel. A grid without blocks queues nothing.
    ///
    /// # Safety
    /// `arguments` are those that the kernel declares, in number, order and type, and what they point to fulfils the
    /// kernel's doc, `DeviceAddress`'s promise included.
    ///
    /// # Panics
    /// When the grid is larger than a device takes.
    pub(super) unsafe fn launch(
        &self,
        stream: &CudaStream,
        grid: Grid,
        arguments: &mut [*mut c_void],
    ) -> Result<(), KernelError> {
        if grid.x == 0 || grid.y == 0 || grid.z == 0 {
            return Ok(());
        }
        assert!(
            grid.x <= i32::MAX as u32 && grid.y <= SHORT_AXIS_MAX && grid.z <= SHORT_AXIS_MAX,
            "{grid:?} of {}",
            self.name
        );
        let blocks = (grid.x, grid.y, grid.z);
        let queued = self.module.context.bind_to_thread().and_then(|()| {
            // SAFETY: the function is of a loaded module; the arguments are the caller's promise. The driver copies them
            // before it returns.
            unsafe {
                result::launch_kernel(
                    self.function,
                    blocks,
                    (grid.threads, 1, 1),
                    0,
                    stream.cu_stream(),
                    arguments,
                )
            }
        });
        queued.map_err(|error| KernelError::Launch {
            kernel: self.name.clone(),
            why: in_words(error),
        })
    }
}
