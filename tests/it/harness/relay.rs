//! A wire that a test can hold still or cut.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedRwLockWriteGuard, RwLock, oneshot};
use tokio::task::{JoinHandle, JoinSet};

use super::port::Port;
use super::{AbortOnDrop, within};

/// Passes on TCP connections to a server.
pub(crate) struct Relay {
    port: Port,
    server: SocketAddr,
    wire: Option<Wire>,
    /// Read while something is passed on.
    flow: Arc<RwLock<()>>,
    frozen: Option<OwnedRwLockWriteGuard<()>>,
}

struct Wire {
    cut: oneshot::Sender<()>,
    task: JoinHandle<()>,
    _abort: AbortOnDrop,
}

impl Relay {
    pub(crate) fn start(server: SocketAddr) -> Self {
        let flow = Arc::default();
        let mut relay = Self { port: Port::reserve(), server, wire: None, flow, frozen: None };
        relay.mend();
        relay
    }

    /// Where clients go.
    pub(crate) fn address(&self) -> SocketAddr {
        self.port.address
    }

    /// From its return on, not one byte is passed on. Connections stay, and new ones are accepted.
    pub(crate) async fn freeze(&mut self) {
        let held = within("the last byte to pass", Arc::clone(&self.flow).write_owned());
        self.frozen = Some(held.await);
    }

    /// Passes on what was held back, and all that comes.
    pub(crate) fn thaw(&mut self) {
        self.frozen = None;
    }

    /// Closes all connections; new ones are refused.
    pub(crate) async fn cut(&mut self) {
        let Some(wire) = self.wire.take() else { return };
        // Its task ends by this.
        drop(wire.cut);
        within("the end of all connections", wire.task).await.unwrap();
    }

    /// Accepts connections again after a cut.
    pub(crate) fn mend(&mut self) {
        let (cut, is_cut) = oneshot::channel();
        let (listener, server, flow) = (self.port.listen(), self.server, Arc::clone(&self.flow));
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            tokio::select! {
                _ = is_cut => {}
                () = accept(&listener, server, &flow, &mut connections) => {}
            }
            drop(listener);
            connections.shutdown().await;
        });
        let abort = AbortOnDrop(task.abort_handle());
        self.wire = Some(Wire { cut, task, _abort: abort });
    }
}

async fn accept(
    listener: &TcpListener,
    server: SocketAddr,
    flow: &Arc<RwLock<()>>,
    connections: &mut JoinSet<()>,
) {
    while let Ok((client, _)) = listener.accept().await {
        let flow = Arc::clone(flow);
        connections.spawn(async move {
            let connected = {
                let _passing = flow.read().await;
                TcpStream::connect(server).await
            };
            let Ok(server) = connected else { return };
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            tokio::join!(pass(from_client, to_server, &flow), pass(from_server, to_client, &flow));
        });
        while connections.try_join_next().is_some() {}
    }
}

/// Copies until one side has ended, and says so to the other.
async fn pass(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    flow: &RwLock<()>,
) {
    let mut buffer = [0; 4096];
    loop {
        let read = from.read(&mut buffer).await.unwrap_or(0);
        let _passing = flow.read().await;
        if read == 0 || to.write_all(&buffer[..read]).await.is_err() {
            drop(to.shutdown().await);
            return;
        }
    }
}
