-- save_end: end a named save, once: publish its result, remove it from the unstored saves, and end its run if it was
-- the run's last op.
-- needs: run_close
-- `closing` is the result of the run's other requests.
local function end_save(prefix, ref, record, result, ttl_ms, closing)
  local weights, resolved = 'cotrain:weights:' .. ref, { ref }
  put_result(ref, result, ttl_ms)
  redis.call('SREM', 'cotrain:tenant:' .. record.tenant .. ':owed', ref)
  if redis.call('HGET', weights, 'last') == '1' then
    local ended = close_run(prefix, record.run, record.tenant, 'closed', closing, ttl_ms)
    for _, request in ipairs(ended or {}) do
      resolved[#resolved + 1] = request
    end
  end
  redis.call('HDEL', weights, 'checkpoint', 'result', 'ttl', 'last')
  redis.call('PUBLISH', 'cotrain:notify:results', table.concat(resolved, '\n'))
end
