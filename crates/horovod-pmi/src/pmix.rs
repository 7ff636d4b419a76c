//! PMIx by its C library, which is looked up at run time.
//!
//! The library of the launcher's own daemon is taken, where this process can see it, because its version is that of
//! the server.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::{Store, StoreError, ancestors};

const NAME: &str = "libpmix.so.2";
/// `PMIX_SUCCESS`.
const SUCCESS: c_int = 0;
/// `PMIX_GLOBAL`: known to processes of all hosts.
const GLOBAL: u8 = 3;
/// `PMIX_BOOL`.
const BOOL: u16 = 1;
/// `PMIX_STRING`.
const STRING: u16 = 3;
/// `PMIX_COLLECT_DATA`. Without it Slurm's nodes fetch the texts of a rank once, and never its later ones.
const COLLECT_DATA: &str = "pmix.collect";

/// `pmix_proc_t`.
#[repr(C)]
#[derive(Clone)]
struct Process {
    namespace: [c_char; 256],
    rank: u32,
}

/// `pmix_value_t`.
#[repr(C)]
struct Value {
    kind: u16,
    content: Content,
}

/// The union is larger in some versions; the library copies no more of it than the type says.
#[repr(C)]
union Content {
    string: *const c_char,
    is_set: bool,
    all: [u64; 7],
}

/// `pmix_info_t`.
#[repr(C)]
struct Info {
    key: [c_char; 512],
    flags: u32,
    value: Value,
}

type Init = unsafe extern "C" fn(*mut Process, *mut c_void, usize) -> c_int;
type Put = unsafe extern "C" fn(u8, *const c_char, *mut Value) -> c_int;
type Commit = unsafe extern "C" fn() -> c_int;
type Fence = unsafe extern "C" fn(*const Process, usize, *const Info, usize) -> c_int;
type Get = unsafe extern "C" fn(
    *const Process,
    *const c_char,
    *const c_void,
    usize,
    *mut *mut Value,
) -> c_int;
type Finalize = unsafe extern "C" fn(*const c_void, usize) -> c_int;

/// The functions in use.
#[derive(Clone, Copy)]
struct Functions {
    init: Init,
    put: Put,
    commit: Commit,
    fence: Fence,
    get: Get,
    finalize: Finalize,
}

/// The connection to the launcher.
pub(crate) struct Pmix {
    functions: Functions,
    own: Process,
}

impl Pmix {
    pub(crate) fn open(namespace: &str, rank: u32) -> Result<Self, StoreError> {
        let mut own = process(namespace, rank).ok_or_else(|| {
            let why = "is no namespace: more than 255 bytes, or a NUL";
            error(format!("PMIX_NAMESPACE={namespace:?} {why}"))
        })?;
        let functions = functions().map_err(error)?;
        // SAFETY: the record is ours and large enough; no information is passed.
        checked("PMIx_Init", unsafe {
            (functions.init)(&mut own, ptr::null_mut(), 0)
        })?;
        let store = Self { functions, own };
        finalize_at_exit(functions.finalize);
        match store.own.rank == rank {
            true => Ok(store),
            false => {
                let found = store.own.rank;
                let why = format!("PMIx_Init found rank {found}, but PMIX_RANK is {rank}");
                Err(error(why))
            }
        }
    }
}

impl Store for Pmix {
    fn put(&mut self, key: &str, value: &str) -> Result<(), StoreError> {
        let (key, value) = (text(key)?, text(value)?);
        let mut content = Content { all: [0; 7] };
        content.string = value.as_ptr();
        let mut value = Value {
            kind: STRING,
            content,
        };
        // SAFETY: key and value live until the call returns, which copies them.
        let code = unsafe { (self.functions.put)(GLOBAL, key.as_ptr(), &mut value) };
        checked("PMIx_Put", code)
    }

    fn fence(&mut self) -> Result<(), StoreError> {
        // SAFETY: no arguments.
        checked("PMIx_Commit", unsafe { (self.functions.commit)() })?;
        let mut content = Content { all: [0; 7] };
        content.is_set = true;
        let mut collect = Info {
            key: [0; 512],
            flags: 0,
            value: Value {
                kind: BOOL,
                content,
            },
        };
        let _fits = place(COLLECT_DATA.as_bytes(), &mut collect.key);
        let info: *const Info = &collect;
        // SAFETY: null stands for all processes of the namespace; the one record of information lives until the call returns.
        let code = unsafe { (self.functions.fence)(ptr::null(), 0, info, 1) };
        checked("PMIx_Fence", code)
    }

    fn get(&mut self, rank: u32, key: &str) -> Result<String, StoreError> {
        let from = Process {
            rank,
            ..self.own.clone()
        };
        let c_key = text(key)?;
        let mut value = ptr::null_mut();
        // SAFETY: process and key live until the call returns; the place for the value is ours.
        let code =
            unsafe { (self.functions.get)(&from, c_key.as_ptr(), ptr::null(), 0, &mut value) };
        checked("PMIx_Get", code)?;
        // SAFETY: after success it is null or a value of the library's, which nobody frees.
        let value: Option<&Value> = unsafe { value.as_ref() };
        // SAFETY: the type says that the union has a string.
        let string = value
            .filter(|value| value.kind == STRING)
            .map(|value| unsafe { value.content.string });
        match string.filter(|string| !string.is_null()) {
            // SAFETY: a string of PMIx ends with NUL.
            Some(string) => Ok(unsafe { CStr::from_ptr(string) }
                .to_string_lossy()
                .into_owned()),
            None => Err(error(format!("rank {rank} has put no text under {key}"))),
        }
    }
}

fn error(why: String) -> StoreError {
    StoreError {
        by: "PMIx".to_owned(),
        why,
    }
}

fn text(of: &str) -> Result<CString, StoreError> {
    CString::new(of).map_err(|_| error(format!("a NUL in {of:?}")))
}

fn process(namespace: &str, rank: u32) -> Option<Process> {
    let mut found = Process {
        namespace: [0; 256],
        rank,
    };
    let bytes = CString::new(namespace).ok()?;
    place(bytes.as_bytes_with_nul(), &mut found.namespace)?;
    Some(found)
}

/// Copies bytes to the begin of a record's field; none if they are too many.
fn place(bytes: &[u8], field: &mut [c_char]) -> Option<()> {
    let places = field.get_mut(..bytes.len())?;
    for (place, byte) in places.iter_mut().zip(bytes) {
        *place = byte.cast_signed() as c_char;
    }
    Some(())
}

fn checked(function: &str, code: c_int) -> Result<(), StoreError> {
    match code {
        SUCCESS => Ok(()),
        code => Err(error(format!("{function} failed with {code}"))),
    }
}

/// The library's functions. The library is never unloaded: its own threads run on.
fn functions() -> Result<Functions, String> {
    let mut errors = Vec::new();
    let found = of_an_ancestor().into_iter().chain([PathBuf::from(NAME)]);
    for path in found {
        // SAFETY: its initialisers are those of the library that the launcher runs, or that the system offers for it.
        let library = match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => std::mem::ManuallyDrop::new(library),
            Err(e) => {
                errors.push(e.to_string());
                continue;
            }
        };
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the type is that of this function in all versions of the library's second interface.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }
                    .map_err(|e| format!("{}: {e}", path.display()))?
            };
        }
        return Ok(Functions {
            init: function!("PMIx_Init"),
            put: function!("PMIx_Put"),
            commit: function!("PMIx_Commit"),
            fence: function!("PMIx_Fence"),
            get: function!("PMIx_Get"),
            finalize: function!("PMIx_Finalize"),
        });
    }
    Err(format!("{NAME} cannot be loaded: {}", errors.join("; ")))
}

/// The library's file in the memory maps of the nearest process above this one that has it.
fn of_an_ancestor() -> Option<PathBuf> {
    ancestors().find_map(|ancestor| {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", ancestor.pid)).ok()?;
        maps.lines().find_map(|line| {
            let path = &line[line.find('/')?..];
            path.rsplit('/')
                .next()?
                .starts_with(NAME)
                .then(|| PathBuf::from(path))
        })
    })
}

static FINALIZE: OnceLock<Finalize> = OnceLock::new();

/// Has `PMIx_Finalize` called when the process exits: an MPI library of this process could not be initialised after it,
/// and a launcher calls an end without it improper.
fn finalize_at_exit(finalize: Finalize) {
    extern "C" fn at_exit() {
        if let Some(finalize) = FINALIZE.get() {
            // SAFETY: it was initialised when this function was registered; a process exits once.
            unsafe { finalize(ptr::null(), 0) };
        }
    }
    if FINALIZE.set(finalize).is_ok() {
        // SAFETY: the function is static and does not unwind.
        unsafe { libc::atexit(at_exit) };
    }
}
