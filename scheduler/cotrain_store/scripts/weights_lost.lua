-- weights_lost: fail the named save whose weights cannot be recreated.
-- Fenced by the worker's epoch. Stored weights, and those of a sampler, stay unchanged.
-- needs: fence, save_end
local prefix, ref = args.prefix, args.ref
local weights = 'cotrain:weights:' .. ref

local text = redis.call('HGET', weights, 'checkpoint')
if not text then
  return 'KEPT'
end
local record = cjson.decode(text)
local member = record.run .. '/' .. record.kind .. '/' .. record.name
redis.call('ZREM', 'cotrain:checkpoint:' .. member .. ':pending', ref)
end_save(prefix, ref, record, args.result, args.ttl_ms, args.closing)
redis.call('SREM', prefix .. 'unstored:' .. args.worker, ref)
redis.call('SREM', prefix .. 'weights', ref)
redis.call('SREM', prefix .. 'external', args.folder)
redis.call('DEL', weights, weights .. ':users')
return 'OK'
