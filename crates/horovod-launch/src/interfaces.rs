//! The addresses of this machine's network interfaces, by name.
#![expect(
    unsafe_code,
    reason = "the C library's list of interfaces has no safe wrapper here"
)]

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Addresses of these interfaces, each of which must be up and have one. IPv6 link-local ones mean nothing
/// elsewhere and are left out.
pub(crate) fn addresses(wanted: &[String]) -> io::Result<Vec<IpAddr>> {
    let known = all()?;
    let mut found = Vec::new();
    for name in wanted {
        let before = found.len();
        found.extend(
            known
                .iter()
                .filter(|(other, _)| other == name)
                .map(|(_, address)| *address),
        );
        if found.len() == before {
            let mut names: Vec<&str> = known.iter().map(|(name, _)| name.as_str()).collect();
            names.sort_unstable();
            names.dedup();
            return Err(io::Error::other(format!(
                "no network interface {name:?} is up on this host; there are {}",
                names.join(", ")
            )));
        }
    }
    Ok(found)
}

fn all() -> io::Result<Vec<(String, IpAddr)>> {
    let mut list = std::ptr::null_mut();
    // SAFETY: `list` is a live local; on success it is a list that is freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = list;
    // SAFETY: null, or an entry of the list, which lives until `freeifaddrs`.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        if entry.ifa_flags & libc::IFF_UP as libc::c_uint == 0 {
            continue;
        }
        // SAFETY: null, or a socket address; `sa_family` is common to all of them.
        let family = unsafe { entry.ifa_addr.as_ref() }.map(|address| i32::from(address.sa_family));
        let address: IpAddr = match family {
            Some(libc::AF_INET) => {
                // SAFETY: the family says that it is a whole `sockaddr_in`.
                let v4 = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into()
            }
            Some(libc::AF_INET6) => {
                // SAFETY: the family says that it is a whole `sockaddr_in6`.
                let v6 = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                Ipv6Addr::from(v6.sin6_addr.s6_addr).into()
            }
            _ => continue,
        };
        if matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local()) {
            continue;
        }
        // SAFETY: a name that ends with zero and lives as long as the list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        found.push((name.to_string_lossy().into_owned(), address));
    }
    // SAFETY: `list` came from `getifaddrs` and is not used any more.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_interfaces_by_name_and_lists_them_for_a_wrong_one() {
        let known = all().expect("a list");
        let (name, address) = known
            .iter()
            .find(|(_, a)| a.is_loopback())
            .expect("a loopback");
        assert!(
            addresses(std::slice::from_ref(name))
                .expect("known")
                .contains(address)
        );
        let error = addresses(&[name.clone(), "nope0".to_owned()])
            .expect_err("unknown")
            .to_string();
        assert!(
            error.contains("\"nope0\"") && error.contains(name.as_str()),
            "{error}"
        );
    }
}
