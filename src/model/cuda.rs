//! Steps that a CUDA device computes: kernels over addresses in its arena. The host gives the orders and waits for the
//! end of the step only; where a group rests with the host, the host multiplies by it, and inputs and outputs cross.
//!
//! All values of a step are places in the arena's scratch, given out from its start in every step; below them lie the
//! vectors that every step reads. The plan counted them, so that running out is a bug.

use super::gpu::Gpu;
use super::host::HostCompute;
use super::matrix::{Matrix, Slice, Walk};
use super::step::{Input, LayerCache, Norm, Rotation, Values};
use super::{Batch, StepError};
use crate::kernels::cuda::{
    AddBias, AddRmsNorm, Attention, CudaKernels, DequantiseRows, DeviceMatrix, DevicePages,
    DeviceRuns, GateMul, GatherRows, InputForm, KernelError, LongAttention, MatrixProduct,
    PagePrecision, QuantiseRows, Rope, Scale, StoreKv, long_attention_scratch_bytes,
    quantised_input_bytes,
};
use crate::kernels::{
    self, Activations, AttentionShape, ComputePool, MatrixView, OutputRows, Product, RopeAngles,
    RowSlice,
};
use crate::memory::{Crossing, CudaDevice, CudaError, DeviceAddress, MemoryError, Region};
use crate::placement::{
    KvType, Plan, SPLIT_ATTENTION_POSITIONS_MIN, SPLIT_ATTENTION_TOKENS_MAX, Tier, WindowPages,
};
use crate::weights::{Arenas, GatheredRows, Lease, Pass};
use std::sync::Arc;

/// Every buffer starts on such a boundary.
const ALIGNMENT: usize = 256;
const F32_BYTES: usize = size_of::<f32>();
/// Rope tables of a model, at most: of layers that see everything, and of those that see a window.
const ROPE_TABLES_MAX: usize = 2;
/// Elements of the longest block of an 8-bit form.
const BLOCK_MAX: usize = 256;

/// A place in the scratch of a CUDA device: f32.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceValues {
    /// In bytes, from the start of the scratch.
    offset: usize,
    count: usize,
}

/// What kernels are told of the step under way; offsets in the scratch.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    width: usize,
    positions: usize,
    runs: usize,
    starts: usize,
    /// Of layers that see everything, and of those that see a window.
    tables: [usize; 2],
    /// Of each rope table.
    angles: [ToldAngles; ROPE_TABLES_MAX],
    /// The places in the step of the tokens whose successor is wanted, and how many they are.
    wanted: usize,
    wanted_count: usize,
    /// More than the position of any token.
    positions_end: usize,
}

/// Numbers that cross the link together: each thing that crosses may have to wait for a piece of a group.
struct Parcel {
    bytes: Vec<u8>,
    /// Its place in the scratch.
    start: usize,
}

impl Parcel {
    fn at(start: usize) -> Parcel {
        Parcel {
            bytes: Vec::new(),
            start,
        }
    }

    /// Gives the offset of the numbers in the scratch.
    fn add<T: bytemuck::NoUninit>(&mut self, numbers: &[T]) -> usize {
        let offset = self.bytes.len().next_multiple_of(ALIGNMENT);
        self.bytes.resize(offset, 0);
        self.bytes.extend_from_slice(bytemuck::cast_slice(numbers));
        self.start + offset
    }
}

/// The angles of one rope table.
#[derive(Clone, Copy, Debug, Default)]
struct ToldAngles {
    offset: usize,
    /// Pairs of a head that are rotated.
    pairs: usize,
}

/// A CUDA device as the one who computes steps.
pub(super) struct CudaCompute {
    device: Arc<CudaDevice>,
    // Dropped before what kernels and copies use: it waits for the device.
    crossing: Crossing,
    kernels: Arc<CudaKernels>,
    scratch: Region,
    /// Vectors end here, and the values of a step begin.
    vectors_end: usize,
    used: usize,
    /// Columns of the widest input of any product.
    widest_input: usize,
    /// Where the 8-bit forms of a product's input are, in blocks of 32 and of 256, when the step has needed them: one
    /// product after the other has them there.
    quantised: [Option<usize>; 2],
    /// Where the scores of long contexts are, when the step has needed them: one layer after the other has them there.
    scores: Option<usize>,
    window_pages: Option<WindowPages>,
    told: Told,
    host: HostCompute,
}

impl CudaCompute {
    pub(super) fn new(
        plan: &Plan,
        arenas: &Arenas,
        gpu: &Gpu,
        pool: ComputePool,
    ) -> Result<CudaCompute, StepError> {
        let device = &gpu.device;
        let split = plan.device_split.unwrap_or_default();
        let crossing = arenas.scratch_region(Tier::Host, plan.crossing_bytes)?;
        Ok(CudaCompute {
            device: Arc::clone(device),
            kernels: Arc::clone(&gpu.kernels),
            crossing: Crossing::new(crossing, Arc::clone(device)),
            scratch: arenas.scratch_region(Tier::Device, split.scratch)?,
            vectors_end: 0,
            used: 0,
            widest_input: 0,
            quantised: [None; 2],
            scores: None,
            window_pages: plan.kv.window,
            told: Told::default(),
            host: HostCompute { pool },
        })
    }

    /// A vector that all steps read. Before the first step only.
    pub(super) fn vector(&mut self, floats: &[f32]) -> Result<Values, StepError> {
        let values = self.take_values(floats.len());
        self.vectors_end = self.used;
        self.upload(bytemuck::cast_slice(floats), values.offset);
        Ok(Values::Device(values))
    }

    /// Some product's input has so many columns.
    pub(super) fn expect_input(&mut self, columns: usize) {
        self.widest_input = self.widest_input.max(columns);
    }

    /// Tells the device of a step; `wanted` are the places in it of the tokens whose successor is wanted. What the step
    /// before, which may have failed, left on its way is done with first.
    pub(super) fn begin(
        &mut self,
        batch: &Batch<'_>,
        angles: &[RopeAngles],
        wanted: &[u32],
    ) -> Result<(), StepError> {
        self.synchronise()?;
        self.used = self.vectors_end;
        self.quantised = [None; 2];
        self.scores = None;
        let (mut positions, mut runs) = (Vec::new(), Vec::new());
        let (mut starts, mut table) = (Vec::new(), Vec::new());
        let mut window_table = Vec::new();
        for (index, run) in (0u32..).zip(&batch.runs) {
            starts.push(table.len() as u32);
            table.extend(run.pages.iter().map(|page| page.0));
            if let Some(window) = self.window_pages {
                assert!(run.slot < window.sequences, "{run:?}, {window:?}");
                window_table.extend((0..run.pages.len()).map(|page| window.page(run.slot, page)));
            }
            positions.extend((run.position..).take(run.tokens.len()));
            runs.extend(run.tokens.iter().map(|_| index));
        }
        let mut told_angles = [ToldAngles::default(); ROPE_TABLES_MAX];
        assert!(angles.len() <= told_angles.len(), "{} tables", angles.len());
        let mut parcel = Parcel::at(self.used);
        for (told, angles) in told_angles.iter_mut().zip(angles) {
            told.offset = parcel.add(angles.rotations());
            told.pairs = angles.pairs();
        }
        self.told = Told {
            width: positions.len(),
            positions: parcel.add(&positions),
            runs: parcel.add(&runs),
            starts: parcel.add(&starts),
            tables: [parcel.add(&table), parcel.add(&window_table)],
            angles: told_angles,
            wanted: parcel.add(wanted),
            wanted_count: wanted.len(),
            positions_end: positions.iter().max().map_or(0, |&last| last as usize + 1),
        };
        self.send_parcel(&parcel);
        // Kernels that read tables which never arrived would read anywhere.
        Ok(self.device.check()?)
    }

    pub(super) fn synchronise(&mut self) -> Result<(), StepError> {
        Ok(self.crossing.synchronise()?)
    }

    pub(super) fn values(&mut self, rows: usize, columns: usize) -> Result<Values, StepError> {
        Ok(Values::Device(self.take_values(rows * columns)))
    }

    /// Stored rows of a matrix, `[rows, columns]`, from where they rest.
    pub(super) fn dequantise(
        &mut self,
        matrix: &Matrix,
        rows: &GatheredRows,
    ) -> Result<Values, StepError> {
        let row_bytes = matrix.kind.row_bytes(matrix.columns as u64).unwrap_or(0) as usize;
        let count = rows.bytes.len() / row_bytes.max(1);
        // Rows that all rest on the device need not be sent.
        let sent = match rows.on_device.len() == count {
            true => &[],
            false => &rows.bytes[..],
        };
        let mut parcel = Parcel::at(self.used);
        let here = self.address(parcel.add(sent)).value();
        let mut addresses: Vec<u64> = (0..count as u64)
            .map(|row| here + row * row_bytes as u64)
            .collect();
        for &(row, address) in &rows.on_device {
            addresses[row] = address.value();
        }
        let addresses = parcel.add(&addresses);
        self.send_parcel(&parcel);
        let output = self.take_values(count * matrix.columns);
        self.device.check()?;
        self.kernels.dequantise_rows(
            self.device.compute_stream(),
            &DequantiseRows {
                kind: matrix.kind,
                addresses: self.address(addresses),
                output: self.address(output.offset),
                rows: count,
                columns: matrix.columns,
            },
        )?;
        Ok(Values::Device(output))
    }

    pub(super) fn add_and_normalise(
        &self,
        x: &Values,
        delta: Option<&Values>,
        norm: &Norm<'_>,
        h: &Values,
    ) -> Result<(), StepError> {
        let count = norm.rows * norm.columns;
        let delta = delta.map(|delta| self.address_of(delta, count));
        self.kernels.add_rms_norm(
            self.device.compute_stream(),
            &AddRmsNorm {
                x: self.address_of(x, count),
                delta,
                weight: self.address_of(norm.weight, norm.columns),
                output: self.address_of(h, count),
                columns: norm.columns,
                tokens: norm.rows,
                epsilon: norm.epsilon,
            },
        )?;
        Ok(())
    }

    pub(super) fn normalise(&self, x: &Values, norm: &Norm<'_>) -> Result<(), StepError> {
        let x = self.address_of(x, norm.rows * norm.columns);
        self.kernels.add_rms_norm(
            self.device.compute_stream(),
            &AddRmsNorm {
                x,
                delta: None,
                weight: self.address_of(norm.weight, norm.columns),
                output: x,
                columns: norm.columns,
                tokens: norm.rows,
                epsilon: norm.epsilon,
            },
        )?;
        Ok(())
    }

    pub(super) fn multiply<const N: usize>(
        &mut self,
        pass: &mut Pass<'_>,
        x: &Input<'_>,
        products: [(&Matrix, &Values); N],
    ) -> Result<(), StepError> {
        // What the host multiplies with, where it has some of the rows. Brought before the device is given any: both
        // multiply at the same time then, instead of the host waiting for the device's rows.
        let of_host = |(matrix, _): &(&Matrix, &Values)| {
            let mut slices = matrix.slices.iter();
            slices.any(|slice| pass.is_for_host(slice.group))
        };
        let floats = match products.iter().any(of_host) {
            true => self.bring(x.values, x.rows * x.columns)?.to_vec(),
            false => Vec::new(),
        };
        let mut on_host = None;
        let mut forms = [None; 2];
        let mut walk = Walk::new(products.map(|(matrix, _)| matrix));
        while let Some((group, slices)) = walk.next() {
            let lease = pass.lease(group)?;
            self.device.check()?;
            for ((matrix, out), slice) in products.into_iter().zip(slices) {
                let Some(slice) = slice else { continue };
                let Some(address) = lease.device_part(slice.part) else {
                    let x =
                        on_host.get_or_insert_with(|| Activations::new(&floats, x.rows, x.columns));
                    self.multiply_on_host(lease, (matrix, slice), x, out);
                    continue;
                };
                let input = self.input(x, InputForm::of(matrix.kind), &mut forms)?;
                let count = x.rows * matrix.rows;
                self.kernels.matmul(
                    self.device.compute_stream(),
                    &MatrixProduct {
                        weight: DeviceMatrix {
                            kind: matrix.kind,
                            rows: slice.rows,
                            columns: matrix.columns,
                            address,
                        },
                        input,
                        tokens: x.rows,
                        output: self.address_of(out, count),
                        stride: matrix.rows,
                        first_column: slice.first_row,
                    },
                )?;
            }
        }
        for (matrix, out) in products {
            let Some(bias) = &matrix.bias else { continue };
            self.kernels.add_bias(
                self.device.compute_stream(),
                &AddBias {
                    y: self.address_of(out, x.rows * matrix.rows),
                    bias: self.address_of(bias, matrix.rows),
                    columns: matrix.rows,
                    tokens: x.rows,
                },
            )?;
        }
        Ok(())
    }

    /// The input in the form that a product reads it in, made when the first asks for it.
    fn input(
        &mut self,
        x: &Input<'_>,
        form: InputForm,
        made: &mut [Option<DeviceAddress>; 2],
    ) -> Result<DeviceAddress, StepError> {
        let floats = self.address_of(x.values, x.rows * x.columns);
        let which = match form {
            InputForm::Floats => return Ok(floats),
            InputForm::Blocks32 => 0,
            InputForm::Blocks256 => 1,
        };
        if let Some(address) = made[which] {
            return Ok(address);
        }
        assert!(x.columns <= self.widest_input, "{} columns", x.columns);
        let offset = match self.quantised[which] {
            Some(offset) => offset,
            None => {
                let columns = self.widest_input.next_multiple_of(BLOCK_MAX);
                let bytes = quantised_input_bytes(form, columns, self.told.width);
                self.take(bytes as usize)
            }
        };
        self.quantised[which] = Some(offset);
        let output = self.address(offset);
        self.kernels.quantise_rows(
            self.device.compute_stream(),
            &QuantiseRows {
                form,
                input: floats,
                output,
                columns: x.columns,
                tokens: x.rows,
            },
        )?;
        made[which] = Some(output);
        Ok(output)
    }

    /// Values of the device as they are when everything given to it is done.
    fn bring(&mut self, values: &Values, count: usize) -> Result<&[f32], StepError> {
        let place = values.device();
        assert!(count <= place.count, "{count} of {place:?}");
        let bytes = count * F32_BYTES;
        let fetched = self.crossing.fetch(&self.scratch, place.offset, bytes)?;
        Ok(bytemuck::cast_slice(fetched))
    }

    /// The host multiplies by rows that rest with it, and sends what comes out.
    fn multiply_on_host(
        &mut self,
        lease: &Lease<'_>,
        (matrix, slice): (&Matrix, &Slice),
        x: &Activations<'_>,
        out: &Values,
    ) {
        let mut floats = vec![0.0; x.width() * slice.rows];
        let mut product = [Product {
            slices: vec![RowSlice {
                weight: MatrixView {
                    kind: matrix.kind,
                    rows: slice.rows,
                    columns: matrix.columns,
                    bytes: lease.part(slice.part),
                },
                first_row: 0,
            }],
            out: OutputRows {
                data: &mut floats,
                stride: slice.rows,
                first_column: 0,
            },
        }];
        let computing = lease.host_computes();
        kernels::matmul_all(&self.host.pool, x, &mut product);
        drop(computing);
        let place = *out.device();
        for (row, floats) in floats.chunks_exact(slice.rows).enumerate() {
            let start = row * matrix.rows + slice.first_row;
            assert!(start + slice.rows <= place.count, "row {row} of {place:?}");
            self.upload(
                bytemuck::cast_slice(floats),
                place.offset + start * F32_BYTES,
            );
        }
    }

    pub(super) fn rope(&self, x: &Values, rotation: &Rotation) -> Result<(), StepError> {
        let (told, angles) = (self.told, self.told.angles[rotation.table]);
        let &Rotation { heads, length, .. } = rotation;
        self.kernels.rope(
            self.device.compute_stream(),
            &Rope {
                x: self.address_of(x, told.width * heads * length),
                rotations: self.address(angles.offset),
                tokens: told.width,
                heads,
                head_length: length,
                rotated_pairs: angles.pairs,
                pairs: rotation.pairs,
            },
        )?;
        Ok(())
    }

    pub(super) fn store(
        &self,
        cache: &mut LayerCache<'_>,
        key: &Values,
        value: &Values,
    ) -> Result<(), StepError> {
        let shape = *cache.kv.shape(cache.layer);
        let tokens = self.told.width;
        self.kernels.store_kv(
            self.device.compute_stream(),
            &StoreKv {
                shape,
                pages: pages_of(cache),
                runs: self.runs(&shape),
                tokens,
                keys: self.address_of(key, tokens * shape.kv_heads * shape.key_length),
                values: self.address_of(value, tokens * shape.kv_heads * shape.value_length),
            },
        )?;
        Ok(())
    }

    pub(super) fn attend(
        &mut self,
        cache: &mut LayerCache<'_>,
        scale: f32,
        (query, out): (&Values, &Values),
    ) -> Result<(), StepError> {
        let shape = *cache.kv.shape(cache.layer);
        let tokens = self.told.width;
        let attention = Attention {
            shape,
            pages: pages_of(cache),
            runs: self.runs(&shape),
            tokens,
            queries: self.address_of(query, tokens * shape.heads * shape.key_length),
            output: self.address_of(out, tokens * shape.heads * shape.value_length),
            scale,
        };
        let positions = self.told.positions_end;
        let is_split = tokens <= SPLIT_ATTENTION_TOKENS_MAX as usize
            && positions >= SPLIT_ATTENTION_POSITIONS_MIN as usize;
        if !is_split {
            let stream = self.device.compute_stream();
            return Ok(self.kernels.attention(stream, &attention)?);
        }
        let offset = match self.scores {
            Some(offset) => offset,
            None => {
                // Layers with a window need less, and the first may be one of them.
                let widest = AttentionShape {
                    heads: cache.kv.heads_max(),
                    window: None,
                    ..shape
                };
                self.take(long_attention_scratch_bytes(&widest, tokens, positions) as usize)
            }
        };
        self.scores = Some(offset);
        let split = LongAttention {
            attention,
            positions,
            scratch: self.address(offset),
        };
        let stream = self.device.compute_stream();
        Ok(self.kernels.long_attention(stream, &split)?)
    }

    pub(super) fn scale(&self, x: &Values, factor: f32, count: usize) -> Result<(), StepError> {
        let scale = Scale {
            x: self.address_of(x, count),
            factor,
            count,
        };
        let stream = self.device.compute_stream();
        Ok(self.kernels.scale(stream, &scale)?)
    }

    pub(super) fn gelu_mul(
        &self,
        gate: &Values,
        up: &Values,
        count: usize,
    ) -> Result<(), StepError> {
        let gate = self.gate(gate, up, count);
        let stream = self.device.compute_stream();
        Ok(self.kernels.gelu_mul(stream, &gate)?)
    }

    pub(super) fn silu_mul(
        &self,
        gate: &Values,
        up: &Values,
        count: usize,
    ) -> Result<(), StepError> {
        let gate = self.gate(gate, up, count);
        let stream = self.device.compute_stream();
        Ok(self.kernels.silu_mul(stream, &gate)?)
    }

    fn gate(&self, gate: &Values, up: &Values, count: usize) -> GateMul {
        GateMul {
            gate: self.address_of(gate, count),
            up: self.address_of(up, count),
            count,
        }
    }

    /// The rows of `x`, `[width, columns]`, of the tokens whose successor is wanted.
    pub(super) fn wanted_rows(&mut self, x: &Values, columns: usize) -> Result<Values, StepError> {
        let rows = self.told.wanted_count;
        let output = self.take_values(rows * columns);
        self.kernels.gather_rows(
            self.device.compute_stream(),
            &GatherRows {
                x: self.address_of(x, self.told.width * columns),
                indices: self.address(self.told.wanted),
                output: self.address(output.offset),
                rows,
                columns,
            },
        )?;
        Ok(Values::Device(output))
    }

    pub(super) fn logits(
        &mut self,
        pass: &mut Pass<'_>,
        head: &Matrix,
        x: &Input<'_>,
    ) -> Result<Vec<Vec<f32>>, StepError> {
        let all = self.values(x.rows, head.rows)?;
        self.multiply(pass, x, [(head, &all)])?;
        let floats = self.bring(&all, x.rows * head.rows)?;
        Ok(floats
            .chunks_exact(head.rows)
            .map(<[f32]>::to_vec)
            .collect())
    }

    /// Where the pages of the runs are listed that a layer of this shape reads.
    fn runs(&self, shape: &AttentionShape) -> DeviceRuns {
        let table = self.told.tables[usize::from(shape.window.is_some())];
        DeviceRuns {
            positions: self.address(self.told.positions),
            runs: self.address(self.told.runs),
            starts: self.address(self.told.starts),
            table: self.address(table),
        }
    }

    /// Sends a parcel to the place that it was made for, which is the next one.
    fn send_parcel(&mut self, parcel: &Parcel) {
        let offset = self.take(parcel.bytes.len());
        assert_eq!(offset, parcel.start, "something was given the place");
        self.upload(&parcel.bytes, offset);
    }

    fn upload(&mut self, bytes: &[u8], offset: usize) {
        self.crossing.upload(bytes, &mut self.scratch, offset);
    }

    fn take_values(&mut self, count: usize) -> DeviceValues {
        DeviceValues {
            offset: self.take(count * F32_BYTES),
            count,
        }
    }

    /// Takes bytes of the scratch until the end of the step; gives their offset.
    fn take(&mut self, bytes: usize) -> usize {
        let offset = self.used;
        let end = (offset + bytes).next_multiple_of(ALIGNMENT);
        assert!(
            end <= self.scratch.bytes_total(),
            "a step of {} tokens needs {end} bytes of scratch, and the plan has {}",
            self.told.width,
            self.scratch.bytes_total()
        );
        self.used = end;
        offset
    }

    /// The address of something that `take` has made room for.
    fn address(&self, offset: usize) -> DeviceAddress {
        self.scratch.device_address(offset, 0)
    }

    /// The address of values of which `count` are used.
    fn address_of(&self, values: &Values, count: usize) -> DeviceAddress {
        let place = values.device();
        assert!(count <= place.count, "{count} of {place:?}");
        self.scratch.device_address(place.offset, count * F32_BYTES)
    }
}

/// Where a layer's part of the pages is.
fn pages_of(LayerCache { kv, layer }: &LayerCache<'_>) -> DevicePages {
    let (precision, element_bytes) = match kv.kind() {
        KvType::F16 => (PagePrecision::F16, 2),
        KvType::F32 => (PagePrecision::F32, 4),
    };
    let start = kv.layer_start(*layer) * element_bytes;
    DevicePages {
        start: kv.region().device_address(start, 0),
        page_stride: kv.page_elements(*layer),
        precision,
    }
}

impl From<KernelError> for StepError {
    fn from(error: KernelError) -> StepError {
        StepError::Numeric(error.to_string())
    }
}

impl From<CudaError> for StepError {
    fn from(error: CudaError) -> StepError {
        match error {
            CudaError::Lost(_) => StepError::DeviceLost(error.to_string()),
            _ => StepError::Numeric(error.to_string()),
        }
    }
}

impl From<MemoryError> for StepError {
    fn from(error: MemoryError) -> StepError {
        StepError::Numeric(error.to_string())
    }
}
