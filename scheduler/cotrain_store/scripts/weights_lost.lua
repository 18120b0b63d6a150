-- weights_lost: fail the named save whose weights cannot be recreated.
-- Fenced by the worker's epoch. Stored weights, and those of a sampler, stay unchanged.
-- needs: save_end
local epoch_key, weights, notify, unstored, of_pool, external, users = unpack(KEYS)
local args = cjson.decode(ARGV[1])
local epoch, ref = args.epoch, args.ref

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
local text = redis.call('HGET', weights, 'checkpoint')
if not text then
  return 'KEPT'
end
local record = cjson.decode(text)
local member = record.run .. '/' .. record.kind .. '/' .. record.name
redis.call('ZREM', 'cotrain:checkpoint:' .. member .. ':pending', ref)
end_save(weights, ref, record, args.prefix, args.result, args.ttl_ms, notify, args.closing)
redis.call('SREM', unstored, ref)
redis.call('SREM', of_pool, ref)
redis.call('SREM', external, args.folder)
redis.call('DEL', weights, users)
return 'OK'
