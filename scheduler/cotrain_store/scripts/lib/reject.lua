-- reject: fail an op that is accepted and not committed. It keeps its seq.
-- needs: ages, spool_refs
-- `log` has the keys: ops, bodies, refs, queue. `failure` has the result, its ttl_ms, and the new body and envelope
-- of the op. The request is added to `resolved`.
local function reject(log, run, seq, failure, resolved)
  local envelope = redis.call('HGET', log.ops, seq)
  local kind, tokens, size, ref = string.match(envelope or '', '^([^|]*)|(%d+)|(%d+)|[^|]*|(.*)$')
  if not kind or kind == 'rejected' then
    return
  end
  release_segment(log.refs, string.match(ref, '^spool:([^:]+):'))
  redis.call('HINCRBY', log.queue, 'tokens', 0 - tonumber(tokens))
  redis.call('HINCRBY', log.queue, 'bytes', #failure.body - tonumber(size))
  redis.call('HSET', log.ops, seq, failure.envelope)
  redis.call('HSET', log.bodies, seq, failure.body)
  put_result(run .. ':' .. seq, failure.result, failure.ttl_ms)
  resolved[#resolved + 1] = run .. ':' .. seq
end
