//! Ports for programs that want to be told theirs.

use std::net::{Ipv4Addr, SocketAddr};

use tokio::net::{TcpListener, TcpSocket};

/// A port of 127.0.0.1 that stays ours, also while nobody listens on it: it is bound here without listening. To a
/// program that names it, and sets `SO_REUSEADDR` as servers do, Linux gives it; to one that wants any, it does not.
#[derive(Debug)]
pub(crate) struct Port {
    _bound: TcpSocket,
    pub(crate) address: SocketAddr,
}

impl Port {
    pub(crate) fn reserve() -> Self {
        let bound = bind((Ipv4Addr::LOCALHOST, 0).into());
        let address = bound.local_addr().unwrap();
        Self { _bound: bound, address }
    }

    pub(crate) fn listen(&self) -> TcpListener {
        bind(self.address).listen(1024).unwrap()
    }
}

fn bind(address: SocketAddr) -> TcpSocket {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(address).unwrap_or_else(|error| panic!("{address}: {error}"));
    socket
}
