//! Pack, append, unpack and conversion over cudarc's slices: everything that the unsafe launches ask of their caller is
//! checked here or held by borrows.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, SyncOnDrop};

use super::caches::{ReadOnDevice, RotationOnDevice, RowNumbers, WriteOnDevice};
use super::conversions::{ConvertOnDevice, check_kv_global_scales, conversion_kernel};
use super::device::Device;
use super::launch::CacheOnDevice;
use super::slice_checks::SliceChecks;
use super::slices::OutElement;
use super::workspace::Workspace;
use crate::layout::{check_global_scale, require_aligned};
use crate::{Error, FamilySpec, Geometry, PageLayout, RopePairs, rope};

/// int32 or int64 numbers, one per row.
#[derive(Debug)]
pub enum RowNumberSlice<'a> {
    /// int32.
    I32(CudaView<'a, i32>),
    /// int64.
    I64(CudaView<'a, i64>),
}

/// The rotation of the rows of an append, as [`crate::Rotation`].
#[derive(Debug)]
pub struct RotationSlices<'a> {
    /// Cosines, then sines, `[max_position, rope_dims]`, 16-byte aligned.
    pub cos_sin: CudaView<'a, f32>,
    /// A position per row.
    pub positions: RowNumberSlice<'a>,
    /// The pairs.
    pub pairs: RopePairs,
}

/// Latent rows and the slots they go to.
#[derive(Debug)]
pub struct AppendSlices<'a, T> {
    /// `[N, d_qk]`, 16-byte aligned.
    pub latent: CudaView<'a, T>,
    /// A slot per row; negative and too large ones skip their row.
    pub slots: RowNumberSlice<'a>,
    /// The rotation of the RoPE lanes.
    pub rotation: Option<RotationSlices<'a>>,
    /// The cache, from the first byte of the first page on; 16-byte aligned.
    pub cache: CudaViewMut<'a, u8>,
    /// Its pages.
    pub pages: usize,
    /// At least [`PreparedCache::append_workspace_bytes`], 16-byte aligned.
    pub workspace: CudaViewMut<'a, u8>,
}

/// Caches of one format and geometry on one device: checked once, with kernels loaded, used any number of times.
#[derive(Debug, Clone, Copy)]
pub struct PreparedCache {
    device: &'static Device,
    spec: &'static FamilySpec,
    layout: PageLayout,
    kv_global_scale: f32,
}

impl PreparedCache {
    /// Checks the geometry and loads the kernels. `kv_global_scale`: 1 for a format that has none.
    pub fn new(
        device: &'static Device,
        spec: &'static FamilySpec,
        geometry: Geometry,
        kv_global_scale: f32,
    ) -> Result<Self, Error> {
        let layout = PageLayout::new(spec, geometry, "")?;
        check_global_scale(spec, kv_global_scale)?;
        device.warm_up_caches(spec)?;
        Ok(Self { device, spec, layout, kv_global_scale })
    }

    /// The layout of a page.
    pub fn layout(&self) -> &PageLayout {
        &self.layout
    }

    /// Bytes of workspace of an append of so many rows: none up to 1,024 rows.
    pub fn append_workspace_bytes(num_rows: usize) -> usize {
        WriteOnDevice::append_workspace_bytes(num_rows)
    }

    /// Enqueues on `stream` what [`crate::append_kv_cache`] or, with a rotation, [`crate::append_kv_cache_with_rope`] does, with
    /// the same bytes. Allocates nothing and waits for nothing.
    ///
    /// # Errors
    /// [`Error::Value`] if a slice has the wrong length, alignment or context, or there are too many rows: nothing was enqueued
    /// then. [`Error::Device`] if the driver refuses.
    pub fn append<T: OutElement>(&self, stream: &CudaStream, slices: &mut AppendSlices<'_, T>) -> Result<(), Error> {
        let checks = self.checks(stream)?;
        let num_rows = slices.slots.len();
        checks.slice("latent", &slices.latent, elements("slot_mapping", num_rows, self.spec.d_qk())?)?;
        slices.slots.check("slot_mapping", num_rows, checks)?;
        let mut max_position = 0;
        if let Some(rotation) = &slices.rotation {
            let width = self.spec.row.rope_dims;
            max_position = rotation.cos_sin.len().checked_div(width).unwrap_or_default();
            rope::check_shapes(self.spec, (max_position, width), rotation.positions.len(), num_rows)?;
            checks.slice("rope_cos_sin", &rotation.cos_sin, max_position * width)?;
            rotation.positions.check("rope_positions", num_rows, checks)?;
        }
        checks.pages("cache", &slices.cache, &self.layout, slices.pages)?;
        let workspace_bytes = slices.workspace.len();
        checks.slice("workspace", &slices.workspace, workspace_bytes)?;

        // The second of each pair tells cudarc of the use when it is dropped, after the launch.
        let (latent, _latent) = slices.latent.device_ptr(stream);
        let (slots, _slots) = slices.slots.on_device(stream);
        let rotation = slices.rotation.as_ref().map(|rotation| {
            let (cos_sin, table_read) = rotation.cos_sin.device_ptr(stream);
            let (positions, positions_read) = rotation.positions.on_device(stream);
            let rotation = RotationOnDevice { cos_sin, max_position, positions, pairs: rotation.pairs };
            (rotation, [table_read, positions_read])
        });
        let (rotation, _rotation) = rotation.unzip();
        let (cache, _cache) = slices.cache.device_ptr_mut(stream);
        let (workspace, _workspace) = slices.workspace.device_ptr_mut(stream);
        require_aligned("latent", latent)?;
        require_aligned("rope_cos_sin", rotation.map_or(0, |rotation| rotation.cos_sin))?;
        require_aligned("workspace", if workspace_bytes == 0 { 0 } else { workspace })?;
        let write = WriteOnDevice {
            spec: self.spec,
            cache: self.on_device("cache", cache, slices.pages)?,
            latent,
            latent_type: T::TYPE,
            num_rows,
            slots: Some(slots),
            rotation,
            kv_global_scale: self.kv_global_scale,
        };
        let workspace = Workspace { pointer: workspace, bytes: workspace_bytes };
        // SAFETY: every length, alignment and context was compared with the layout; what is written is borrowed exclusively, so
        // it overlaps nothing; cudarc orders other uses of the slices before and after this one.
        unsafe { self.device.write_kv_cache(&write, workspace, stream.cu_stream()) }
    }

    /// Enqueues on `stream` what [`crate::pack_kv_cache`] does: `latent` `[N, d_qk]`, 16-byte aligned, goes to slots 0 to N-1 of
    /// `pages` pages; all their other bytes become zero. Allocates nothing and waits for nothing.
    ///
    /// # Errors
    /// As [`PreparedCache::append`].
    pub fn pack<T: OutElement>(
        &self,
        stream: &CudaStream,
        latent: &CudaView<'_, T>,
        cache: &mut CudaViewMut<'_, u8>,
        pages: usize,
    ) -> Result<(), Error> {
        let checks = self.checks(stream)?;
        let (d_qk, len) = (self.spec.d_qk(), latent.len());
        checks.slice("latent", latent, len)?;
        checks.whole_pages("cache", cache, &self.layout, pages)?;
        let most = pages * self.layout.page_block_size();
        if !len.is_multiple_of(d_qk) || len / d_qk > most {
            let accepted = format!("at most {most} rows of {d_qk} elements, one per slot");
            return Err(Error::value("latent", accepted, format!("{len} elements")));
        }
        let (latent, _latent) = latent.device_ptr(stream);
        let (cache, _cache) = cache.device_ptr_mut(stream);
        require_aligned("latent", latent)?;
        let write = WriteOnDevice {
            spec: self.spec,
            cache: self.on_device("cache", cache, pages)?,
            latent,
            latent_type: T::TYPE,
            num_rows: len / d_qk,
            slots: None,
            rotation: None,
            kv_global_scale: self.kv_global_scale,
        };
        // SAFETY: as in `append`.
        unsafe { self.device.write_kv_cache(&write, Workspace::EMPTY, stream.cu_stream()) }
    }

    /// Enqueues on `stream` what [`crate::unpack_kv_cache`] computes: the values of every slot of `pages` pages, in `out`
    /// `[num_slots, d_qk]`, 16-byte aligned. Allocates nothing and waits for nothing.
    ///
    /// # Errors
    /// As [`PreparedCache::append`].
    pub fn unpack(
        &self,
        stream: &CudaStream,
        cache: &CudaView<'_, u8>,
        pages: usize,
        out: &mut CudaViewMut<'_, f32>,
    ) -> Result<(), Error> {
        let checks = self.checks(stream)?;
        checks.pages("cache", cache, &self.layout, pages)?;
        let num_slots = pages * self.layout.page_block_size();
        checks.slice("out", out, elements("cache", num_slots, self.spec.d_qk())?)?;
        let (cache, _cache) = cache.device_ptr(stream);
        let (out, _out) = out.device_ptr_mut(stream);
        require_aligned("out", out)?;
        let cache = self.on_device("cache", cache, pages)?;
        let read = ReadOnDevice { spec: self.spec, cache, out, kv_global_scale: self.kv_global_scale };
        // SAFETY: as in `append`.
        unsafe { self.device.read_kv_cache(&read, stream.cu_stream()) }
    }

    fn checks<'a>(&self, stream: &'a CudaStream) -> Result<SliceChecks<'a>, Error> {
        let checks = SliceChecks { device: self.device, stream };
        checks.stream().map(|()| checks)
    }

    fn on_device(&self, name: &str, pointer: u64, pages: usize) -> Result<CacheOnDevice, Error> {
        require_aligned(name, pointer)?;
        Ok(CacheOnDevice { pointer, pages, layout: self.layout })
    }
}

/// A conversion between two prepared caches of one device.
#[derive(Debug, Clone, Copy)]
pub struct PreparedConversion {
    from: PreparedCache,
    to: PreparedCache,
}

impl PreparedConversion {
    /// Loads the kernel. Refuses formats that do not hold the same dimensions, caches of two devices, and another factor
    /// where codes are kept.
    pub fn new(from: &PreparedCache, to: &PreparedCache) -> Result<Self, Error> {
        if from.device.ordinal() != to.device.ordinal() {
            let accepted = format!("on device {} like `from`", from.device.ordinal());
            return Err(Error::value("to", accepted, format!("device {}", to.device.ordinal())));
        }
        let specs = [from.spec, to.spec];
        check_kv_global_scales(specs, [from.kv_global_scale, to.kv_global_scale])?;
        from.device.warm_up_kernel(conversion_kernel(specs[0], specs[1])?)?;
        Ok(Self { from: *from, to: *to })
    }

    /// Enqueues on `stream` what [`crate::convert_kv_cache`] does: the first `num_slots` slots of `from` go to the same slots
    /// of `to`, all of whose other bytes become zero. Allocates nothing and waits for nothing.
    ///
    /// # Errors
    /// As [`PreparedCache::append`].
    pub fn convert(
        &self,
        stream: &CudaStream,
        (from, from_pages): (&CudaView<'_, u8>, usize),
        (to, to_pages): (&mut CudaViewMut<'_, u8>, usize),
        num_slots: usize,
    ) -> Result<(), Error> {
        let checks = self.from.checks(stream)?;
        checks.pages("from", from, &self.from.layout, from_pages)?;
        checks.whole_pages("to", to, &self.to.layout, to_pages)?;
        let (from, _from) = from.device_ptr(stream);
        let (to, _to) = to.device_ptr_mut(stream);
        let convert = ConvertOnDevice {
            specs: [self.from.spec, self.to.spec],
            from: self.from.on_device("from", from, from_pages)?,
            to: self.to.on_device("to", to, to_pages)?,
            num_slots,
            kv_global_scales: [self.from.kv_global_scale, self.to.kv_global_scale],
        };
        // SAFETY: as in `PreparedCache::append`.
        unsafe { self.from.device.convert_kv_cache(&convert, stream.cu_stream()) }
    }
}

impl RowNumberSlice<'_> {
    fn len(&self) -> usize {
        match self {
            Self::I32(numbers) => numbers.len(),
            Self::I64(numbers) => numbers.len(),
        }
    }

    fn check(&self, name: &str, num_rows: usize, checks: SliceChecks<'_>) -> Result<(), Error> {
        match self {
            Self::I32(numbers) => checks.slice(name, numbers, num_rows),
            Self::I64(numbers) => checks.slice(name, numbers, num_rows),
        }
    }

    fn on_device<'a>(&'a self, stream: &'a CudaStream) -> (RowNumbers, SyncOnDrop<'a>) {
        let ((pointer, read), wide) = match self {
            Self::I32(numbers) => (numbers.device_ptr(stream), false),
            Self::I64(numbers) => (numbers.device_ptr(stream), true),
        };
        (RowNumbers { pointer, wide }, read)
    }
}

fn elements(name: &str, rows: usize, width: usize) -> Result<usize, Error> {
    rows.checked_mul(width).ok_or_else(|| Error::value(name, "small enough for 64 bits", rows))
}
