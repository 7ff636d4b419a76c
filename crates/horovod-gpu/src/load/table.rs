//! Tables of C functions: one declaration names a symbol once, with its type, and whether it may be missing.

/// Declares a struct of function pointers that `read` fills from a library.
///
/// `required` functions are there or the library is refused, with the names of all that it lacks; `optional` ones are
/// `Option`s. The types are those of the library's header: that is what makes the calls sound.
macro_rules! function_table {
    (
        $(#[$attribute:meta])*
        struct $name:ident;
        required { $( $field:ident = $symbol:literal ( $($argument:ty),* ) $(-> $result:ty)?; )* }
        optional { $( $maybe:ident = $maybe_symbol:literal ( $($maybe_argument:ty),* ); )* }
    ) => {
        $(#[$attribute])*
        #[derive(Clone)]
        pub(crate) struct $name {
            $( pub(crate) $field: unsafe extern "C" fn($($argument),*) -> $crate::load::function_table!(@result $($result)?), )*
            $( pub(crate) $maybe: Option<unsafe extern "C" fn($($maybe_argument),*) -> std::ffi::c_int>, )*
        }

        impl $name {
            /// Looks all functions up, by the name that `name` gives for each; or says which are missing. `None`: this
            /// library has nothing of that kind.
            pub(crate) fn read(
                library: &$crate::load::Library,
                name: impl Fn(&'static std::ffi::CStr) -> Option<&'static std::ffi::CStr>,
            ) -> Result<Self, String> {
                let missing: Vec<&str> = [$($symbol),*]
                    .into_iter()
                    .map(|symbol: &std::ffi::CStr| name(symbol).unwrap_or(symbol))
                    .filter(|symbol| library.address(symbol).is_none())
                    .filter_map(|symbol| symbol.to_str().ok())
                    .collect();
                if !missing.is_empty() {
                    return Err(format!("it lacks {}", missing.join(", ")));
                }
                // SAFETY: functions of the declared types, in every version that is accepted, also by their other
                // names; all required ones exist.
                unsafe {
                    Ok(Self {
                        $( $field: name($symbol).and_then(|name| library.function(name)).ok_or("it changed")?, )*
                        $( $maybe: name($maybe_symbol).and_then(|name| library.function(name)), )*
                    })
                }
            }

            /// Each function's name, the bytes of its arguments, and whether it must be there.
            #[cfg(test)]
            pub(crate) const FUNCTIONS: &'static [$crate::load::Signature] = &[
                $( ($symbol, &[$(size_of::<$argument>()),*], true), )*
                $( ($maybe_symbol, &[$(size_of::<$maybe_argument>()),*], false), )*
            ];
        }
    };
    (@result $result:ty) => { $result };
    (@result) => { std::ffi::c_int };
}
pub(crate) use function_table;

/// A function's signature, which tests compare with headers.
#[cfg(test)]
pub(crate) type Signature = (&'static std::ffi::CStr, &'static [usize], bool);
