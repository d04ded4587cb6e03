//! Which device computes: chosen once, before a plan is made.

use super::Usage;
use super::hand_over::open_gpu;
use anyhow::bail;
use strata::config::{Config, DeviceSetting, DeviceTier, FreeDeviceMemory, MemorySetting};
use strata::gguf::{Gguf, Hyperparameters};
use strata::memory::{DEVICE_RESERVE_BYTES, find_cuda_driver};
use strata::model::{Gpu, gpu_supports};
use strata::placement::DeviceKind;

/// The device that plans are made for and, where it is a GPU that was opened, models are loaded on.
#[derive(Clone)]
pub(super) enum Device {
    Cpu,
    /// `auto` found nothing better, for this reason.
    CpuBecause(String),
    Emulated,
    Cuda(Gpu),
    /// For a plan alone.
    CudaElsewhere,
}

/// The model that a device is chosen for.
#[derive(Clone, Copy)]
pub(super) struct Candidate<'a> {
    pub(super) gguf: &'a Gguf,
    pub(super) hyperparameters: &'a Hyperparameters,
}

impl Device {
    /// The device to load a model on.
    pub(super) fn to_use(config: &Config, model: Candidate<'_>) -> anyhow::Result<Device> {
        match config.device {
            DeviceSetting::Cpu => Ok(Device::Cpu),
            DeviceSetting::Emulated => Ok(Device::Emulated),
            DeviceSetting::Cuda(ordinal) => match open(ordinal, model) {
                Ok(gpu) => Ok(Device::Cuda(gpu)),
                Err(why) => bail!(Usage(format!(
                    "--device cuda:{ordinal}: {why}; give --device cpu to do without"
                ))),
            },
            DeviceSetting::Auto => match open(0, model) {
                Ok(gpu) => Ok(Device::Cuda(gpu)),
                Err(why) => Ok(Device::CpuBecause(why)),
            },
        }
    }

    /// The device to make a plan for: a GPU need not be there.
    pub(super) fn to_plan_for(config: &Config, model: Candidate<'_>) -> anyhow::Result<Device> {
        match (config.device, config.device_memory) {
            (DeviceSetting::Cuda(_), MemorySetting::Bytes(_)) => Ok(Device::CudaElsewhere),
            (DeviceSetting::Cuda(ordinal), MemorySetting::Auto) => {
                Ok(open(ordinal, model).map_or(Device::CudaElsewhere, Device::Cuda))
            }
            _ => Device::to_use(config, model),
        }
    }

    /// Says why there is no GPU, where one would have been taken.
    pub(super) fn log(&self, config: &Config) {
        if let Device::CpuBecause(why) = self {
            // Who has a driver expects more.
            match find_cuda_driver() {
                Ok(()) => tracing::warn!("the CPU computes: {why}"),
                Err(_) => tracing::info!("the CPU computes: {why}"),
            }
            if config.device_memory != MemorySetting::Auto {
                tracing::warn!("device-memory has no effect: there is no device ({why})");
            }
        }
    }

    pub(super) fn kind(&self) -> DeviceKind {
        match self {
            Device::Cpu | Device::CpuBecause(_) => DeviceKind::Cpu,
            Device::Emulated => DeviceKind::Emulated,
            Device::Cuda(_) | Device::CudaElsewhere => DeviceKind::Cuda,
        }
    }

    pub(super) fn tier(&self) -> anyhow::Result<DeviceTier> {
        Ok(match self {
            Device::Cpu | Device::CpuBecause(_) => DeviceTier::None,
            Device::Emulated => DeviceTier::Emulated,
            Device::CudaElsewhere => DeviceTier::Gpu { free: None },
            Device::Cuda(gpu) => {
                let (free, _) = gpu.device.memory_bytes()?;
                DeviceTier::Gpu {
                    free: Some(FreeDeviceMemory {
                        bytes: free,
                        reserve: DEVICE_RESERVE_BYTES,
                    }),
                }
            }
        })
    }

    pub(super) fn gpu(&self) -> Option<Gpu> {
        match self {
            Device::Cuda(gpu) => Some(gpu.clone()),
            Device::Cpu | Device::CpuBecause(_) | Device::Emulated | Device::CudaElsewhere => None,
        }
    }
}

/// The GPU, or in words why it does not serve for this model.
fn open(ordinal: u32, model: Candidate<'_>) -> Result<Gpu, String> {
    let gpu = open_gpu(ordinal)?;
    let supports = gpu_supports(model.gguf, model.hyperparameters);
    supports.map_err(|why| format!("it cannot compute this model: {why}"))?;
    Ok(gpu)
}
