//! Which device computes: chosen once, before a plan is made.

use super::Usage;
use anyhow::bail;
use std::sync::Arc;
use strata::config::{Config, DeviceSetting, DeviceTier, FreeDeviceMemory, MemorySetting};
use strata::kernels::cuda::{CudaKernels, KernelError};
use strata::memory::{CudaDevice, DEVICE_RESERVE_BYTES};
use strata::placement::DeviceKind;

/// The device that plans are made for and, where it is a GPU that was opened, models are loaded on.
#[derive(Clone)]
pub(super) enum Device {
    Cpu,
    Emulated,
    Cuda(Arc<CudaDevice>),
    /// For a plan alone, with a budget that was given.
    CudaElsewhere,
}

impl Device {
    /// The device to load a model on.
    pub(super) fn to_use(config: &Config) -> anyhow::Result<Device> {
        match config.device {
            DeviceSetting::Cpu => Ok(Device::Cpu),
            DeviceSetting::Emulated => Ok(Device::Emulated),
            DeviceSetting::Cuda(ordinal) => match open(ordinal) {
                Ok(device) => Ok(Device::Cuda(device)),
                Err(why) => bail!(Usage(format!(
                    "--device cuda:{ordinal}: {why}; give --device cpu to do without"
                ))),
            },
            DeviceSetting::Auto => match open(0) {
                Ok(device) => Ok(Device::Cuda(device)),
                Err(why) => {
                    tracing::info!("the CPU computes: {why}");
                    Ok(Device::Cpu)
                }
            },
        }
    }

    /// The device to make a plan for: a GPU need not be there when its budget is given.
    pub(super) fn to_plan_for(config: &Config) -> anyhow::Result<Device> {
        match (config.device, config.device_memory) {
            (DeviceSetting::Cuda(_), MemorySetting::Bytes(_)) => Ok(Device::CudaElsewhere),
            _ => Device::to_use(config),
        }
    }

    pub(super) fn kind(&self) -> DeviceKind {
        match self {
            Device::Cpu => DeviceKind::Cpu,
            Device::Emulated => DeviceKind::Emulated,
            Device::Cuda(_) | Device::CudaElsewhere => DeviceKind::Cuda,
        }
    }

    pub(super) fn tier(&self) -> anyhow::Result<DeviceTier> {
        Ok(match self {
            Device::Cpu => DeviceTier::None,
            Device::Emulated => DeviceTier::Emulated,
            Device::CudaElsewhere => DeviceTier::Gpu { free: None },
            Device::Cuda(device) => {
                let (free, _) = device.memory_bytes()?;
                DeviceTier::Gpu {
                    free: Some(FreeDeviceMemory {
                        bytes: free,
                        reserve: DEVICE_RESERVE_BYTES,
                    }),
                }
            }
        })
    }

    pub(super) fn cuda(&self) -> Option<Arc<CudaDevice>> {
        match self {
            Device::Cuda(device) => Some(Arc::clone(device)),
            Device::Cpu | Device::Emulated | Device::CudaElsewhere => None,
        }
    }
}

/// The device, or in words what is missing.
fn open(ordinal: u32) -> Result<Arc<CudaDevice>, String> {
    if !CudaKernels::ARE_COMPILED_IN {
        return Err(KernelError::NotCompiledIn.to_string());
    }
    CudaDevice::open(ordinal as usize).map_err(|error| error.to_string())
}
