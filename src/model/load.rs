//! From a file to a loaded model: read the index, make the plan, allocate, load, check.

use super::Model;
use super::cuda::CudaCompute;
use super::gemma3::Gemma3;
use super::gpu::{Gpu, gpu_supports};
use super::host::HostCompute;
use super::llama::Llama;
use super::matrix::ModelError;
use super::step::Compute;
use crate::gguf::{Architecture, Gguf, GgufError, Hyperparameters};
use crate::kernels::ComputePool;
use crate::memory::{
    CudaError, FilePlace, MAX_BLOCK_BYTES, MemoryError, Phase, Rung, logical_block_bytes,
};
use crate::metrics::Metrics;
use crate::placement::{DeviceKind, Plan, PlanError, PlanRequest, Tier, plan};
use crate::trace::Trace;
use crate::weights::{Arenas, LoadError, Loading, ModelFile, Traffic, Weights};
use std::path::Path;
use std::sync::Arc;

// Homes, rings and pages take of an arena what the plan says.
const _: () = assert!(crate::placement::ARENA_ALIGNMENT as usize == crate::memory::SPAN_ALIGNMENT);

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(
        "the architecture `{0}` is not supported; llama (Llama 2 and 3, Mistral, SmolLM, TinyLlama), qwen2, qwen3 and gemma3 are"
    )]
    Architecture(String),
    #[error("a GPU cannot compute it: {0}; give --device cpu")]
    NotForGpu(String),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("allocate memory: {0}")]
    Memory(#[from] MemoryError),
    #[error("bring the model to the device: {0}")]
    Device(CudaError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// A model whose plan is made: nothing is allocated yet, no weight is read.
pub struct PlannedModel {
    files: Vec<FilePlace>,
    pub gguf: Gguf,
    pub hyperparameters: Hyperparameters,
    pub plan: Arc<Plan>,
    /// What the model is loaded on, where the plan is for a CUDA device.
    pub gpu: Option<Gpu>,
    /// What is told of its steps; off unless set.
    pub trace: Trace,
}

/// A model that computes, and what others may know of it while the engine thread owns it.
pub struct LoadedModel {
    pub model: Box<dyn Model>,
    pub reader: Option<(Rung, String)>,
    pub traffic: Box<dyn Fn() -> Traffic + Send + Sync>,
    /// The memory of each tier.
    pub arenas: Arenas,
}

impl PlannedModel {
    /// Reads the index, checks every tensor's shape and makes the plan. `read_alignment` of the request is replaced
    /// by what the file's storage asks
    /// for.
    pub fn open(path: &Path, request: &PlanRequest) -> Result<PlannedModel, OpenError> {
        PlannedModel::of_index(Gguf::open(path)?, request)
    }

    /// The same for an index that is at hand: of files, or of a shape card, whose plan can be read and not loaded.
    pub fn of_index(gguf: Gguf, request: &PlanRequest) -> Result<PlannedModel, OpenError> {
        let hyperparameters = check(&gguf)?;
        if request.device == DeviceKind::Cuda {
            gpu_supports(&gguf, &hyperparameters).map_err(OpenError::NotForGpu)?;
        }
        let files = gguf.files.iter();
        let block_bytes = files.map(|file| logical_block_bytes(&file.path));
        let request = PlanRequest {
            read_alignment: u64::from(block_bytes.max().unwrap_or(MAX_BLOCK_BYTES)),
            ..request.clone()
        };
        let plan = Arc::new(plan(&gguf, &hyperparameters, &request)?);
        Ok(PlannedModel {
            files: places(&gguf),
            gguf,
            hyperparameters,
            plan,
            gpu: None,
            trace: Trace::off(),
        })
    }

    /// Allocates what the plan says and loads the resident groups. `progress` hears the
    /// share of resident bytes that is loaded, and ends the loading by answering false. The model computes with `pool`.
    pub fn load(&self, pool: ComputePool, loading: &Loading<'_>) -> Result<LoadedModel, OpenError> {
        self.load_from(ModelFile::At(&self.files), pool, loading)
    }

    /// The same from files that may be read in a way of the caller's.
    pub fn load_from(
        &self,
        file: ModelFile<'_>,
        pool: ComputePool,
        loading: &Loading<'_>,
    ) -> Result<LoadedModel, OpenError> {
        Phase::begin_loading();
        let device = self.gpu.as_ref().map(|gpu| &gpu.device);
        let arenas = Arenas::allocate(&self.plan, device)?;
        // First, so that what crosses the link with a step lies in what is locked to its pages.
        let compute = match &self.gpu {
            Some(gpu) => {
                let cuda = CudaCompute::new(&self.plan, &arenas, gpu, pool);
                Compute::Cuda(Box::new(cuda.map_err(ModelError::Compute)?))
            }
            None => Compute::Host(HostCompute { pool }),
        };
        let mut kv_region = arenas.kv_region(&self.plan)?;
        if kv_region.cuda().is_some() {
            // As an arena of the host is from the start: kernels load slots of a page that nobody wrote, and use none.
            kv_region.clear();
        }
        let mut weights = Weights::load(
            file,
            &self.gguf,
            Arc::clone(&self.plan),
            arenas.clone(),
            loading,
        )?;
        weights.set_trace(self.trace.clone(), &self.gguf);
        publish(&self.plan, loading.metrics);
        let reader = weights.reader_rung();
        let traffic = Box::new(weights.traffic());
        let (gguf, shape) = (&self.gguf, &self.hyperparameters);
        let model: Box<dyn Model> = match architecture(gguf)? {
            Architecture::Gemma3 => {
                Box::new(Gemma3::new(gguf, shape, weights, kv_region, compute)?)
            }
            architecture @ (Architecture::Llama | Architecture::Qwen2 | Architecture::Qwen3) => {
                let model = Llama::new(gguf, architecture, shape, weights, kv_region, compute);
                Box::new(model?)
            }
        };

        if let Some(gpu) = &self.gpu {
            // Everything that was sent has arrived, or the model is not loaded.
            gpu.device.synchronise().map_err(OpenError::Device)?;
        }
        Phase::end_loading();
        Ok(LoadedModel {
            model,
            reader,
            traffic,
            arenas,
        })
    }
}

/// Whether a model can be computed on a CPU: its architecture and the shape of every tensor. Gives what it says of its shape.
pub fn check(gguf: &Gguf) -> Result<Hyperparameters, OpenError> {
    gguf.refuse_foreign()?;
    let hyperparameters = hyperparameters(gguf)?;
    super::shapes::check(gguf, architecture(gguf)?, &hyperparameters)?;
    Ok(hyperparameters)
}

/// Where the files of an index are, for those who read them.
pub fn places(gguf: &Gguf) -> Vec<FilePlace> {
    let files = gguf.files.iter();
    let place = files.map(|file| FilePlace {
        path: file.path.clone(),
        base: file.base,
    });
    place.collect()
}

/// What a file of an architecture that is known here says of its shape.
pub fn hyperparameters(gguf: &Gguf) -> Result<Hyperparameters, OpenError> {
    architecture(gguf)?;
    Ok(Hyperparameters::from_gguf(gguf)?)
}

fn architecture(gguf: &Gguf) -> Result<Architecture, OpenError> {
    let name = gguf.architecture()?;
    Architecture::from_name(name).ok_or_else(|| OpenError::Architecture(name.to_owned()))
}

/// What the plan fixes once, as metrics.
fn publish(plan: &Plan, metrics: &Metrics) {
    let splits = [
        (Tier::Device, plan.device_split),
        (Tier::Host, Some(plan.host_split)),
    ];
    for (tier, split) in splits {
        let Some(split) = split else { continue };
        let name = tier.name();
        metrics
            .memory_budget_bytes
            .with_label_values(&[name])
            .set(split.budget as i64);
        for (kind, bytes) in [
            ("weights", split.weights),
            ("ring", split.ring),
            ("kv", split.kv),
            ("scratch", split.scratch),
        ] {
            metrics
                .memory_used_bytes
                .with_label_values(&[name, kind])
                .set(bytes as i64);
        }
        metrics
            .memory_largest_free_bytes
            .with_label_values(&[name])
            .set(split.free() as i64);
    }
    for tier in [Tier::Device, Tier::Host, Tier::Storage] {
        metrics
            .weight_home_bytes
            .with_label_values(&[tier.name()])
            .set(plan.weight_home_bytes(tier) as i64);
    }
    if let Some(prediction) = plan.predictions.first() {
        metrics.step_predicted_seconds.set(prediction.step_seconds);
    }
}
