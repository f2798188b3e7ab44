//! The decision service of `proto/llmring/v1/decisions.proto`.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio_stream::Stream;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;
use tonic::{Request, Response, Status};

use crate::telemetry::observer::Observer;
use crate::telemetry::pb;
use pb::decisions_server::{Decisions, DecisionsServer};

/// Streams decisions to watchers.
#[derive(Debug)]
pub struct DecisionService(Arc<Observer>);

impl DecisionService {
    /// Returns the gRPC service over what `observer` sees.
    #[must_use]
    pub fn server(observer: Arc<Observer>) -> DecisionsServer<Self> {
        DecisionsServer::new(Self(observer))
    }
}

#[tonic::async_trait]
impl Decisions for DecisionService {
    type WatchStream = Watched;

    async fn watch(&self, request: Request<pb::WatchRequest>) -> Result<Response<Watched>, Status> {
        Ok(Response::new(Watched {
            records: BroadcastStream::new(self.0.watch()),
            wanted: request.into_inner(),
            lost: 0,
        }))
    }
}

/// The records that one watcher wants.
#[derive(Debug)]
pub struct Watched {
    records: BroadcastStream<Arc<pb::Record>>,
    wanted: pb::WatchRequest,
    lost: u64,
}

impl Stream for Watched {
    type Item = Result<pb::WatchReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match Pin::new(&mut self.records).poll_next(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Ready(Some(Err(BroadcastStreamRecvError::Lagged(lost)))) => self.lost += lost,
                Poll::Ready(Some(Ok(record))) if wants(&self.wanted, &record) => {
                    let lost = std::mem::take(&mut self.lost);
                    return Poll::Ready(Some(Ok(pb::WatchReply {
                        record: Some((*record).clone()),
                        lost,
                    })));
                }
                Poll::Ready(Some(Ok(_))) => {}
            }
        }
    }
}

fn wants(wanted: &pb::WatchRequest, record: &pb::Record) -> bool {
    let conversation =
        record.conversation.as_ref().map_or("", |conversation| conversation.id.as_str());
    let matches = |wanted: &str, has: &str| wanted.is_empty() || wanted == has;
    matches(&wanted.conversation, conversation)
        && matches(&wanted.endpoint, &record.target)
        && matches(&wanted.reason, &record.reason)
}
