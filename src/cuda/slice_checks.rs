//! What every call over cudarc's slices asks of them before it enqueues anything.

use cudarc::driver::{CudaStream, DeviceSlice};

use super::device::Device;
use crate::layout::require_page_bytes;
use crate::{Error, PageLayout};

/// The place where slices must lie.
#[derive(Clone, Copy)]
pub(super) struct SliceChecks<'a> {
    pub device: &'static Device,
    pub stream: &'a CudaStream,
}

impl SliceChecks<'_> {
    /// The stream belongs to the device's primary context.
    pub fn stream(self) -> Result<(), Error> {
        if self.stream.context().cu_ctx() != self.device.context() {
            return Err(Error::value("stream", self.place(), "one of another context"));
        }
        Ok(())
    }

    /// A slice has so many elements and lies in the stream's context.
    pub fn slice<T>(self, name: &str, slice: &impl DeviceSlice<T>, elements: usize) -> Result<(), Error> {
        if slice.len() != elements {
            return Err(Error::value(name, format!("{elements} elements long"), slice.len()));
        }
        if slice.stream().context().cu_ctx() != self.stream.context().cu_ctx() {
            return Err(Error::value(name, self.place(), "memory of another context"));
        }
        Ok(())
    }

    /// A slice holds the payload of so many pages.
    pub fn pages(
        self,
        name: &str,
        slice: &impl DeviceSlice<u8>,
        layout: &PageLayout,
        pages: usize,
    ) -> Result<(), Error> {
        require_page_bytes(name, layout.extent(pages), pages, slice.len())?;
        self.slice(name, slice, slice.len())
    }

    /// A slice that is written holds so many pages whole, gaps included.
    pub fn whole_pages(
        self,
        name: &str,
        slice: &impl DeviceSlice<u8>,
        layout: &PageLayout,
        pages: usize,
    ) -> Result<(), Error> {
        require_page_bytes(name, pages.checked_mul(layout.page_stride()), pages, slice.len())?;
        self.slice(name, slice, slice.len())
    }

    fn place(self) -> String {
        format!("in the primary context of device {}", self.device.ordinal())
    }
}
