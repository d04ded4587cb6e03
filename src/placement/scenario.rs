//! How fast a step is, and how fast it could be: a plan's groups and a machine's rates as the jobs that the simulator
//! runs, and the physical limit beside what it finds.

use super::plan::{residence_at, uses_device_ring, uses_host_ring};
use super::planner::DeviceKind;
use super::simulate::{Job, Machine, StepTimes, steady_step};
use super::{Executor, Group, GroupKind, Plan, Rates, Residence, TierSplit};
use crate::gguf::{Hyperparameters, TensorInfo, TensorType};

/// The widths that every plan predicts.
pub(super) const PREDICTED_WIDTHS: [u32; 4] = [1, 8, 64, 512];

/// Positions that the sequences of a predicted step hold already, where the context has twice as many.
const PREDICTED_DEPTH: u32 = 512;

/// Those at which products are measured: at one of them each type is at its fastest.
const FASTEST_WIDTHS: [u32; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];

/// The prompt whose time to the first token is told.
pub const PREDICTED_PROMPT: u32 = 4096;

/// Attention, where it has not been measured: it reads the cache at half the rate of the products and computes at a
/// third of theirs.
const ASSUMED_ATTENTION_READING: f64 = 0.5;
const ASSUMED_ATTENTION_COMPUTING: f64 = 1.0 / 3.0;

/// The products of a half of a layer whose input is made of the others' outputs.
const SECOND_PRODUCTS: [&str; 2] = ["attn_output.weight", "ffn_down.weight"];

/// The share of the time of transfers that counts though computation hides them.
const MOVING_COSTS: f64 = 0.05;

/// A copy of the emulated device reads a byte of RAM and writes it.
const EMULATED_COPY_RAM: f64 = 2.0;

/// What a step spends most of its time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    Storage,
    Link,
    Device,
    /// The host's kernels, or the RAM that they and the link share.
    HostCompute,
}

impl Bound {
    pub const fn name(self) -> &'static str {
        match self {
            Bound::Storage => "storage",
            Bound::Link => "link",
            Bound::Device => "device",
            Bound::HostCompute => "host compute",
        }
    }

    /// The busiest. Where two are equally busy, computation is named: it is what cannot be hidden.
    fn of(times: &StepTimes) -> Bound {
        let mut bound = Bound::HostCompute;
        let mut busiest = times.host;
        for (candidate, seconds) in [
            (Bound::Device, times.device),
            (Bound::Link, times.link),
            (Bound::Storage, times.storage),
        ] {
            if seconds > busiest {
                (bound, busiest) = (candidate, seconds);
            }
        }
        bound
    }
}

/// A steady-state step of `width` tokens; sampling comes on top.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    pub width: u32,
    /// Positions before the step's tokens, in each of its sequences.
    pub depth: u32,
    pub step_seconds: f64,
    pub tokens_per_second: f64,
    /// No plan makes a step faster than this with these budgets and rates.
    pub limit_seconds: f64,
    pub bound: Bound,
    /// How long each resource is busy within the step.
    pub storage_seconds: f64,
    pub link_seconds: f64,
    pub device_seconds: f64,
    pub host_seconds: f64,
}

impl Prediction {
    pub fn limit_tokens_per_second(&self) -> f64 {
        per_second(self.width, self.limit_seconds)
    }
}

fn per_second(tokens: u32, seconds: f64) -> f64 {
    if seconds > 0.0 {
        f64::from(tokens) / seconds
    } else {
        0.0
    }
}

/// The rows of one tensor in a group, as a product sees them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Product {
    /// Whether its input is what the products before it in the same half of a layer give: the output projection of
    /// attention and the down projection of the feed-forward half. Products of one input need nothing of each other.
    pub(super) is_second: bool,
    pub(super) kind: TensorType,
    pub(super) bytes: u64,
    pub(super) elements: u64,
}

/// The products of a group.
pub(super) fn products(group: &Group, tensors: &[TensorInfo]) -> Vec<Product> {
    let product = |part: &super::Part| {
        let tensor = &tensors[part.tensor];
        let rows = part.rows.end - part.rows.start;
        Product {
            is_second: SECOND_PRODUCTS
                .iter()
                .any(|name| tensor.name.ends_with(name)),
            kind: tensor.kind,
            bytes: part.bytes,
            elements: rows.saturating_mul(tensor.columns()),
        }
    };
    group.parts.iter().map(product).collect()
}

/// Attention of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LayerAttention {
    /// Bytes of keys and values of one position.
    position_bytes: f64,
    /// Floating-point operations for a token and a position that it sees.
    operations: f64,
    /// Positions that a token sees at most.
    window: f64,
}

/// Attention of every layer.
pub(super) fn attention(shape: &Hyperparameters, element_bytes: u64) -> Vec<LayerAttention> {
    let lengths = f64::from(shape.key_length) + f64::from(shape.value_length);
    let layers = shape.head_count.iter().zip(&shape.head_count_kv);
    layers
        .enumerate()
        .map(|(layer, (&heads, &heads_kv))| LayerAttention {
            window: shape
                .window
                .and_then(|window| window.of_layer(layer))
                .map_or(f64::INFINITY, f64::from),
            position_bytes: f64::from(heads_kv) * lengths * element_bytes as f64,
            operations: 2.0 * f64::from(heads) * lengths,
        })
        .collect()
}

/// What predictions need of a plan; the planner compares candidates that are not plans yet.
#[derive(Clone, Copy)]
pub(super) struct Scenario<'a> {
    pub(super) device: DeviceKind,
    pub(super) groups: &'a [Group],
    pub(super) residences: &'a [Residence],
    /// Of each group.
    pub(super) products: &'a [Vec<Product>],
    /// Of each layer.
    pub(super) attention: &'a [LayerAttention],
    pub(super) rates: &'a Rates,
    pub(super) host_width_max: u32,
    pub(super) host_entries: u32,
    pub(super) device_entries: u32,
    pub(super) context: u32,
    pub(super) parallel: u32,
    /// The budgets of both tiers, without the KV cache.
    pub(super) device_bytes: u64,
    pub(super) host_bytes: u64,
}

impl<'a> Scenario<'a> {
    pub(super) fn of(plan: &'a Plan) -> Scenario<'a> {
        Scenario {
            device: plan.device,
            groups: &plan.groups,
            residences: &plan.residences,
            products: &plan.products,
            attention: &plan.attention,
            rates: &plan.rates,
            host_width_max: plan.host_width_max,
            host_entries: plan.host_ring.entries,
            device_entries: plan.device_ring.entries,
            context: plan.context,
            parallel: plan.parallel,
            device_bytes: plan.device_split.as_ref().map_or(0, TierSplit::without_kv),
            host_bytes: plan.host_split.without_kv(),
        }
    }

    /// The depth of the predictions that every plan makes.
    pub(super) fn usual_depth(&self) -> u32 {
        PREDICTED_DEPTH.min(self.context / 2)
    }

    pub(super) fn predict(&self, width: u32, depth: u32) -> Prediction {
        let width = width.max(1);
        let jobs = self.jobs(width, depth);
        let times = steady_step(&jobs, &self.machine());
        Prediction {
            width,
            depth,
            step_seconds: times.seconds,
            tokens_per_second: per_second(width, times.seconds),
            limit_seconds: self.limit_seconds(width, depth),
            bound: Bound::of(&times),
            storage_seconds: times.storage,
            link_seconds: times.link,
            device_seconds: times.device,
            host_seconds: times.host,
        }
    }

    fn machine(&self) -> Machine {
        let rates = self.rates;
        let emulated = self.device == DeviceKind::Emulated;
        // At its full rate, something that does so many bytes in a second of processor time.
        let processors =
            |rate: f64, of_one: Option<f64>| of_one.map_or(0.0, |of_one| rate / of_one);
        Machine {
            storage: rates.storage_bytes_per_second,
            link: rates.link_bytes_per_second,
            ram: rates.host_memory_bytes_per_second,
            processors: rates.processors.map_or(f64::INFINITY, f64::from),
            // What is read is verified at once.
            reading_processors: [
                rates.reading_bytes_per_processor_second,
                rates.verifying_bytes_per_processor_second,
            ]
            .into_iter()
            .map(|of_one| processors(rates.storage_bytes_per_second, of_one))
            .sum(),
            copying_processors: match emulated {
                true => processors(rates.link_bytes_per_second, rates.copy_bytes_per_second),
                false => 0.0,
            },
            copying_ram: if emulated { EMULATED_COPY_RAM } else { 1.0 },
            host_entries: self.host_entries,
            device_entries: self.device_entries,
        }
    }

    fn streamable(&self) -> impl Iterator<Item = usize> {
        (0..self.groups.len()).filter(|&index| self.groups[index].is_streamable())
    }

    fn jobs(&self, width: u32, depth: u32) -> Vec<Job> {
        let mut jobs: Vec<Job> = Vec::new();
        let mut stage = 0;
        let mut before = None;
        for index in self.streamable() {
            let input = self.input(index);
            if input.is_none() || input != before {
                stage += 1;
            }
            before = input;
            let attention = self.attention_of(index, width, depth);
            let is_apart = self.device == DeviceKind::Cuda && attention > 0.0;
            let begins = self.products[index].first();
            let is_before = begins.is_some_and(|product| product.is_second);
            if is_apart && is_before {
                jobs.push(gpu_attention(attention, stage));
                stage += 1;
            }
            let group = &self.groups[index];
            let residence = residence_at(self.residences[index], width, self.host_width_max);
            let bytes = group.entry_bytes as f64;
            let present = |uses: bool| if uses { bytes } else { 0.0 };
            let on_gpu = self.on_gpu(residence.executor);
            jobs.push(Job {
                read_bytes: present(uses_host_ring(group, residence)),
                copy_bytes: present(uses_device_ring(group, residence)),
                compute_seconds: self.product_seconds(index, width, on_gpu)
                    + if is_apart { 0.0 } else { attention },
                compute_bytes: if on_gpu {
                    0.0
                } else {
                    group.weight_bytes as f64
                },
                executor: residence.executor,
                stage,
            });
            if is_apart && !is_before {
                stage += 1;
                jobs.push(gpu_attention(attention, stage));
            }
        }
        jobs
    }

    /// What the products of a group multiply; groups of the same input may be computed at the same time, by a GPU and the
    /// host. `None`: by more than one input, or there is nobody to share with.
    fn input(&self, index: usize) -> Option<(GroupKind, Option<u32>, bool)> {
        if self.device != DeviceKind::Cuda {
            return None;
        }
        let group = &self.groups[index];
        let (first, rest) = self.products[index].split_first()?;
        let is_one = rest
            .iter()
            .all(|product| product.is_second == first.is_second);
        is_one.then_some((group.kind, group.layer, first.is_second))
    }

    /// Whether an executor is a GPU: the emulated device is the host's processors.
    fn on_gpu(&self, executor: Executor) -> bool {
        self.device == DeviceKind::Cuda && executor == Executor::Device
    }

    /// The rows that a group's products see: in the head one of each sequence, whatever the width.
    fn rows(&self, index: usize, width: u32) -> u32 {
        match self.groups[index].kind {
            GroupKind::Head => width.min(self.parallel),
            _ => width,
        }
    }

    /// Of all products of a group.
    fn product_seconds(&self, index: usize, width: u32, on_gpu: bool) -> f64 {
        let rates = self.rates;
        let rows = self.rows(index, width);
        let seconds = |product: &Product| {
            let (bytes, elements) = (product.bytes as f64, product.elements as f64);
            if on_gpu {
                let operations = 2.0 * elements * f64::from(rows);
                (bytes / rates.device_memory_bytes_per_second)
                    .max(operations / rates.device_flops_per_second)
            } else {
                rates.host_product_seconds(product.kind.name(), bytes, elements, rows)
            }
        };
        total(self.products[index].iter().map(seconds))
    }

    /// The layer whose attention comes with a group: the first that holds rows of its output projection, which is attention's
    /// only user.
    fn attends(&self, index: usize) -> Option<u32> {
        let holds_output = |index: usize| {
            let group = self.groups.get(index)?;
            let products = self.products[index].iter();
            let is_output = group.kind == GroupKind::Attention
                && products.into_iter().any(|product| product.is_second);
            group.layer.filter(|_| is_output)
        };
        let layer = holds_output(index)?;
        let before = index.checked_sub(1).and_then(holds_output);
        (before != Some(layer)).then_some(layer)
    }

    fn attention_of(&self, index: usize, width: u32, depth: u32) -> f64 {
        let layer = self.attends(index);
        layer.map_or(0.0, |layer| self.attention_seconds(layer, width, depth))
    }

    /// Steps of no more tokens than sequences decode, wider ones are a prompt's.
    fn attention_seconds(&self, layer: u32, width: u32, depth: u32) -> f64 {
        let Some(layer) = self.attention.get(layer as usize) else {
            return 0.0;
        };
        let (tokens, depth) = (f64::from(width), f64::from(depth));
        let (read, seen) = match width <= self.parallel {
            true => {
                let seen = (depth + 1.0).min(layer.window);
                (tokens * seen, seen)
            }
            false => (
                depth.min(layer.window) + tokens,
                (depth + (tokens + 1.0) / 2.0).min(layer.window),
            ),
        };
        let rates = self.rates;
        let (reading, computing) = match (self.device, &rates.host_attention) {
            (DeviceKind::Cuda, _) => (
                rates.device_memory_bytes_per_second,
                rates.device_flops_per_second * ASSUMED_ATTENTION_COMPUTING,
            ),
            (_, Some(measured)) => (measured.bytes_per_second, measured.flops_per_second),
            (_, None) => (
                rates.host_kernel_bytes_per_second * ASSUMED_ATTENTION_READING,
                rates.host_flops_per_second * ASSUMED_ATTENTION_COMPUTING,
            ),
        };
        (read * layer.position_bytes / reading).max(tokens * seen * layer.operations / computing)
    }

    /// What no plan gets below: the larger of what fits no memory, at the rate of storage, and the computation with all
    /// weights resident. On the emulated device what does not fit there crosses the link, too. A GPU and the host may
    /// compute at once: together they get through the weights at the rates of the GPU's memory and of what leaves RAM, for
    /// the host's kernels or the link; what does not fit the GPU leaves RAM; and all operations are shared.
    fn limit_seconds(&self, width: u32, depth: u32) -> f64 {
        let rates = self.rates;
        let weights = total(
            self.streamable()
                .map(|index| self.groups[index].weight_bytes as f64),
        );
        let memory = self.device_bytes.saturating_add(self.host_bytes) as f64;
        let storage = (weights - memory).max(0.0) / rates.storage_bytes_per_second;
        let missing = (weights - self.device_bytes as f64).max(0.0);
        let attention = self.streamable();
        let attention = total(attention.map(|index| self.attention_of(index, width, depth)));
        if self.device != DeviceKind::Cuda {
            let products = self.streamable();
            let products = total(products.map(|index| self.product_seconds(index, width, false)));
            let moved = match self.device {
                DeviceKind::Emulated if width > self.host_width_max => missing,
                _ => 0.0,
            };
            return storage
                .max(moved / rates.link_bytes_per_second)
                .max(products + attention);
        }
        let (host_bytes, host_operations) = self.fastest_of_host();
        let leaves_ram =
            (rates.link_bytes_per_second + host_bytes).min(rates.host_memory_bytes_per_second);
        let together = rates.device_memory_bytes_per_second + leaves_ram;
        let operations = 2.0
            * total(self.streamable().map(|index| {
                let products = self.products[index].iter();
                let elements = total(products.map(|product| product.elements as f64));
                elements * f64::from(self.rows(index, width))
            }));
        storage
            .max(weights / together)
            .max(missing / leaves_ram)
            .max(operations / (rates.device_flops_per_second + host_operations))
            .max(attention)
    }

    /// The most bytes of weights, and the most operations, that the host gets through in a second with any of the weight
    /// types.
    fn fastest_of_host(&self) -> (f64, f64) {
        let mut fastest = (0.0f64, 0.0f64);
        let mut seen: Vec<TensorType> = Vec::new();
        for product in self.products.iter().flatten() {
            if seen.contains(&product.kind) || product.bytes == 0 {
                continue;
            }
            seen.push(product.kind);
            let (bytes, elements) = (product.bytes as f64, product.elements as f64);
            for width in FASTEST_WIDTHS {
                let seconds =
                    self.rates
                        .host_product_seconds(product.kind.name(), bytes, elements, width);
                fastest.0 = fastest.0.max(bytes / seconds);
                fastest.1 = fastest.1.max(2.0 * elements * f64::from(width) / seconds);
            }
        }
        fastest
    }

    /// Seconds until the first token of an answer to a prompt, and the limit of them: chunks of the widest step. What
    /// grows with the depth grows in proportion, so that the first chunk and the last tell of all.
    pub(super) fn first_token_seconds(&self, prompt: u32, step_width: u32) -> (f64, f64) {
        let width = step_width.min(prompt).max(1);
        let chunks = f64::from(prompt.div_ceil(width));
        let first = self.predict(width, 0);
        let last = self.predict(width, prompt.saturating_sub(width));
        (
            chunks * (first.step_seconds + last.step_seconds) / 2.0,
            chunks * (first.limit_seconds + last.limit_seconds) / 2.0,
        )
    }

    /// What the planner compares: the time of a decoded token times that of a token of a prompt, so that neither is
    /// bought with the other. What is moved counts a little even where it hides: it is the part that others disturb.
    pub(super) fn cost(&self, step_width: u32) -> f64 {
        let depth = self.usual_depth();
        let seconds = |width: u32| {
            let step = steady_step(&self.jobs(width, depth), &self.machine());
            let moved = MOVING_COSTS * (step.storage + step.link);
            (step.seconds + moved) / f64::from(width)
        };
        seconds(1) * seconds(step_width.max(1))
    }
}

/// Attention of a layer on a GPU, which has the pages: between products of the layer, whoever has those.
fn gpu_attention(seconds: f64, stage: u32) -> Job {
    Job {
        read_bytes: 0.0,
        copy_bytes: 0.0,
        compute_seconds: seconds,
        compute_bytes: 0.0,
        executor: Executor::Device,
        stage,
    }
}

/// `Iterator::sum` of no floats is -0.0, which reports would show.
fn total(numbers: impl Iterator<Item = f64>) -> f64 {
    numbers.fold(0.0, |sum, number| sum + number)
}
